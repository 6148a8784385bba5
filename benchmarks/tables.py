"""Tables of figures on the terminal. Needs rich, which a peer's environment may lack: import it where it prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def new_table(title: str, corner: str, *headings: str) -> Table:
    """Names on the left, figures on the right."""
    table = Table(corner, title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def show(table: Table, missing: Mapping[str, str], width: int = 100) -> None:
    """The table, and who is not in it."""
    console = Console(width=width)
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name} was left out: {reason}", markup=False, highlight=False)
