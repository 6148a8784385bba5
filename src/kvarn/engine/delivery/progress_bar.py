"""A bar on the terminal for answers that are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, as_completed

from kvarn.types import Completion


def show_progress(answers: Sequence[Future[Completion]]) -> None:
    """Draw a bar on stderr until every answer is there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(answers))
        for _ in as_completed(answers):
            bar.advance(task)
