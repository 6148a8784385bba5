"""A progress bar for downloads and long work, on stderr so that stdout stays clean for answers and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvarn.hub import OnProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, Task

MIN_BYTES = 10_000  # a smaller total counts chunks, tensors or steps


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Yield a callback that draws a bar from its first call on; without a call nothing is shown or imported."""
    bar = _LazyProgressBar()
    try:
        yield bar.update
    finally:
        bar.stop()


class _LazyProgressBar:
    def __init__(self) -> None:
        self._stop: Callable[[], None] = lambda: None
        self._draw: OnProgress | None = None

    def update(self, done: int, total: int | None, label: str) -> None:
        if self._draw is None:
            self._draw = self._start()
        self._draw(done, total, label)

    def stop(self) -> None:
        self._stop()

    def _start(self) -> OnProgress:
        from rich.console import Console

        console = Console(stderr=True)
        return self._start_bar(console) if console.is_terminal else _log_lines(console)

    def _start_bar(self, console: Console) -> OnProgress:
        from rich.progress import Progress

        progress = Progress(*_columns(), console=console, transient=True)
        task = progress.add_task("", total=None)
        progress.start()
        self._stop = progress.stop
        shown = ""

        def draw(done: int, total: int | None, label: str) -> None:
            nonlocal shown
            if label != shown:  # a new file or phase: speed and remaining time start anew
                progress.reset(task, description=label, total=total, completed=done)
                shown = label
            progress.update(task, completed=done, total=total)

        return draw


def _log_lines(console: Console) -> OnProgress:
    """Where stderr is no terminal: one line per file or phase."""
    shown: set[str] = set()

    def draw(_done: int, total: int | None, label: str) -> None:
        if label not in shown:
            shown.add(label)
            console.print(f"{label}{_in_brackets(total)}", markup=False, highlight=False)

    return draw


def _in_brackets(total: int | None) -> str:
    if not total:
        return ""
    return f" ({total / 1e6:,.1f} MB)" if _is_bytes(total) else f" ({total:,})"


def _columns() -> tuple[ProgressColumn, ...]:
    """What the bar shows: bytes with their speed, or how many of how many."""
    from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn
    from rich.text import Text

    class AmountColumn(ProgressColumn):
        def __init__(self) -> None:
            super().__init__()
            self._size, self._speed = DownloadColumn(), SpeedColumn()

        def render(self, task: Task) -> Text:
            done, total = int(task.completed), None if task.total is None else int(task.total)
            if _is_bytes(done if total is None else total):
                return self._size.render(task) + Text(" ") + self._speed.render(task)
            return Text(f"{done:,}" if total is None else f"{done:,} of {total:,}")

    return TextColumn("{task.description}", markup=False), BarColumn(), AmountColumn(), TimeRemainingColumn()


def _is_bytes(total: int) -> bool:
    return total >= MIN_BYTES
