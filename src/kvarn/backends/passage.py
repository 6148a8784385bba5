"""A batch on its way through a model in pieces, so that nobody beside it waits for the whole of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvarn.backends.batch import Batch

if TYPE_CHECKING:
    from kvarn.backends.protocol import Backend, Hidden


class Passage(Protocol):
    """One batch under way. A backend has one at a time: a new one ends the one before it."""

    num_slices: int  # pieces that take about the same time, for example layers

    def advance(self, seconds: float) -> Hidden | None:
        """Compute for about that long, at least one piece; the hidden states when all is done, None before."""


class WholePassage:
    """For backends that compute a batch in one piece."""

    num_slices = 1

    def __init__(self, backend: Backend, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch

    def advance(self, seconds: float) -> Hidden | None:  # noqa: ARG002
        return self._backend.forward(self._batch)
