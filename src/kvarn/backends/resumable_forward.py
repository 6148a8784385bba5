"""A batch on its way through a model in pieces, so that nobody beside it waits for the whole of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from kvarn.backends.batch import Batch

if TYPE_CHECKING:
    from kvarn.backends.protocol import Backend, Hidden


class ResumableForward(Protocol):
    """One batch under way. A backend has one at a time: a new one ends the one before it."""

    @property
    def piece_s(self) -> float:
        """How long the pieces that take longest take, so far; for example layers."""

    def advance(self, seconds: float) -> Hidden | None:
        """Compute for about that long, at least one piece; the hidden states when all is done, None before."""


class SingleShotForward:
    """For backends that compute a batch in one piece."""

    def __init__(self, backend: Backend, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        self.piece_s = 0.0

    def advance(self, seconds: float) -> Hidden | None:  # noqa: ARG002
        began = time.perf_counter()
        hidden = self._backend.forward(self._batch)
        self.piece_s = time.perf_counter() - began
        return hidden
