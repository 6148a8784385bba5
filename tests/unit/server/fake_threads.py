"""A thread as /proc/self/task shows it, in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path


class FakeThread:
    """Made as a sleeping one that has never run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ran_ns = self._waited_ns = self._num_turns = 0
        self.take_turn(ran_s=0.0, waited_s=0.0)

    def take_turn(self, *, ran_s: float, waited_s: float, state: str = "S") -> None:
        """Wait for a CPU, run on it, and be in a state."""
        self._ran_ns += round(ran_s * 1e9)
        self._waited_ns += round(waited_s * 1e9)
        self._num_turns += 1
        (self._folder / "schedstat").write_text(f"{self._ran_ns} {self._waited_ns} {self._num_turns}\n")
        self.become(state)

    def become(self, state: str) -> None:
        """Change the state only: a wait is added up when it is over."""
        (self._folder / "stat").write_text(f"7 (a (strange) name) {state} 1 7 7\n")
