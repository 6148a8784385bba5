"""For how long threads of this process were runnable without a CPU, because the machine was busy with others.

Reads the scheduler's figures below /proc/self/task; where a system has none, the result is always 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class _SchedStat:
    """A thread's /proc/.../schedstat: nanoseconds on a CPU, nanoseconds runnable before its turns, turns."""

    ran_ns: int
    waited_ns: int
    num_turns: int


class StarvationMeter:
    """Compares with the last measurement."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._before: dict[str, _SchedStat] = {}

    def reset(self) -> None:
        """The next measurement is the first."""
        self._before = {}

    def starved_s(self, passed_s: float) -> float:
        """What the most starved thread waited for a CPU in the passed_s since the last measurement; 0.0."""
        now = {task.name: turns for task in self._list_tasks() if (turns := _read_schedstat(task)) is not None}
        waits = [self._waited_s(name, turns, passed_s) for name, turns in now.items() if name in self._before]
        self._before = now
        return min(max(waits, default=0.0), passed_s)

    def _list_tasks(self) -> list[Path]:
        try:
            return list(self._tasks.iterdir())
        except OSError:
            return []

    def _waited_s(self, name: str, now: _SchedStat, passed_s: float) -> float:
        # The kernel adds a wait when it is over; one that is not shows in the thread's state only.
        if now == self._before[name]:
            return passed_s if _is_runnable(self._tasks / name) else 0.0
        return (now.waited_ns - self._before[name].waited_ns) / 1e9


def _read_schedstat(task: Path) -> _SchedStat | None:
    try:
        ran, waited, turns = (task / "schedstat").read_text(encoding="ascii").split()
        return _SchedStat(int(ran), int(waited), int(turns))
    except (OSError, ValueError):  # the thread has ended, or the system has no such figures
        return None


def _is_runnable(task: Path) -> bool:
    try:
        # `tid (name) state ...`; the name may have spaces and brackets.
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False
