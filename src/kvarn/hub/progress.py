"""The progress callback of downloads: called often, so it must be cheap."""

from __future__ import annotations

from collections.abc import Callable

# (bytes done, bytes in all if known, what is being done)
OnProgress = Callable[[int, int | None, str], None]


def silent(_done: int, _total: int | None, _label: str) -> None:
    """Report nothing."""
