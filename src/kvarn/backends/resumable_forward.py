"""A forward pass that can be interrupted between pieces of layers, so that other requests do not wait for all of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from kvarn.backends.batch import Batch

if TYPE_CHECKING:
    from kvarn.backends.protocol import Backend, Hidden


class ResumableForward(Protocol):
    """The forward pass of one batch. A backend has one at a time: a new one invalidates the one before it."""

    @property
    def piece_s(self) -> float:
        """Duration of the longest pieces so far, in seconds; a piece is a layer, for example."""

    def advance(self, seconds: float) -> Hidden | None:
        """Compute for about that long, at least one piece; return the hidden states when all is done, None before."""


class SingleShotForward:
    """For backends that cannot interrupt a forward pass."""

    def __init__(self, backend: Backend, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        self.piece_s = 0.0

    def advance(self, seconds: float) -> Hidden | None:  # noqa: ARG002
        started = time.perf_counter()
        hidden = self._backend.forward(self._batch)
        self.piece_s = time.perf_counter() - started
        return hidden
