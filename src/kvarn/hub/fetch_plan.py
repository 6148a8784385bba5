"""What a pull is going to fetch, known before the first byte: the interface between the sources and `locate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvarn.hub.progress import OnProgress
from kvarn.hub.store import StoredFile


@dataclass(frozen=True, slots=True)
class Outline:
    """A planned fetch in numbers; sizes are None when the server does not give them."""

    source: str
    version: str
    files: tuple[str, ...]
    download_bytes: int | None
    model_bytes: int | None
    scratch_bytes: int = 0  # needed on disk besides the model while fetching


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files that lie complete and verified in the staging folder."""

    entry: str
    files: tuple[StoredFile, ...]


OnPlan = Callable[[Outline], None]  # told before the first byte; may raise to refuse it


class FetchPlan(Protocol):
    """A fetch that is ready to run."""

    @property
    def outline(self) -> Outline: ...

    def fetch(self, scratch: Path, on_progress: OnProgress) -> Fetched:
        """Put the model's files into `staged_files(scratch)`; `scratch` keeps what a later run can continue."""
        ...
