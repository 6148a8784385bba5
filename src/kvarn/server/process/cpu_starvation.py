"""For how long threads of this process could have run and were not let, because the machine was busy with others.

Reads the scheduler's figures below /proc/self/task; where a system has none, nobody is ever starved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class _Turns:
    """A thread's /proc/.../schedstat: nanoseconds on a CPU, nanoseconds runnable before its turns, turns."""

    ran_ns: int
    waited_ns: int
    num_turns: int


class StarvationMeter:
    """Compares with its last look."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._before: dict[str, _Turns] = {}

    def forget(self) -> None:
        """The next look is the first."""
        self._before = {}

    def starved_s(self, passed_s: float) -> float:
        """Of the passed_s since the last look, what the most starved thread waited for a CPU; 0.0 at the first."""
        now = {task.name: turns for task in self._listed() if (turns := _turns(task)) is not None}
        waits = [self._waited_s(name, turns, passed_s) for name, turns in now.items() if name in self._before]
        self._before = now
        return min(max(waits, default=0.0), passed_s)

    def _listed(self) -> list[Path]:
        try:
            return list(self._tasks.iterdir())
        except OSError:
            return []

    def _waited_s(self, name: str, now: _Turns, passed_s: float) -> float:
        # The kernel adds a wait up when it is over: of one that is not, only the thread's state tells.
        if now == self._before[name]:
            return passed_s if _is_runnable(self._tasks / name) else 0.0
        return (now.waited_ns - self._before[name].waited_ns) / 1e9


def _turns(task: Path) -> _Turns | None:
    try:
        ran, waited, turns = (task / "schedstat").read_text(encoding="ascii").split()
        return _Turns(int(ran), int(waited), int(turns))
    except (OSError, ValueError):  # the thread has ended, or the system tells no such thing
        return None


def _is_runnable(task: Path) -> bool:
    try:
        # `tid (name) state ...`; the name may have spaces and brackets.
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False
