"""Rows with adapters: hidden states that remember whose head they meet, and the products of the reference backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import EMBEDDING, HEAD, AdapterUse, LoraWeights
from kvarn.backends.batch import Batch

Float32 = npt.NDArray[np.float32]
Uses = tuple[tuple[AdapterUse, ...], ...]


class AdaptedRows(np.ndarray[Any, np.dtype[np.float32]]):
    """Hidden states of which some meet a head that an adapter changes: `adapters` has those of each row."""

    adapters: Uses = ()

    def __getitem__(self, rows: Any) -> Any:
        """Rows keep their adapters; whatever else is taken is a plain array."""
        found = super().__getitem__(rows)
        if isinstance(rows, tuple | int | np.integer) or not isinstance(found, AdaptedRows):
            return np.asarray(found)
        found.adapters = tuple([self.adapters[i] for i in np.arange(len(self))[rows]])
        return found


def with_head_adapters(hidden: Float32, batch: Batch) -> Float32:
    """The states of a batch's output rows, with their adapters where one of them changes the head."""
    if not any(use.changes_head for uses in batch.adapters for use in uses):
        return hidden
    sequences = np.searchsorted(batch.row_starts, batch.output_rows, side="right") - 1
    found = hidden.view(AdaptedRows)
    found.adapters = tuple([batch.adapters[i] for i in sequences])
    return cast(Float32, found)


def head_adapters(hidden: Float32) -> Uses:
    """Of each row; empty where none changes the head."""
    return hidden.adapters if isinstance(hidden, AdaptedRows) else ()


class AdaptedWeights(Mapping[str, Float32]):
    """The weights of a model and what the rows of one batch add to its products: the definition of adapters.

    Every row is computed on its own, so that its bits do not depend on the others.
    """

    def __init__(self, weights: Mapping[str, Float32], uses: Uses) -> None:
        self._weights = weights
        self._uses = uses  # by row

    def added(self, name: str, x: Float32, y: Float32) -> Float32:
        """Y plus what the rows' adapters make of x beside the matrix `name`."""
        for row, uses in enumerate(self._uses):
            for use in uses:
                if pair := cast(LoraWeights, use.handle).pairs.get(name):
                    y[row] += np.float32(pair.scale * use.scale) * (pair.b @ (pair.a @ x[row]))
        return y

    def added_to_embedding(self, tokens: npt.NDArray[np.integer], x: Float32) -> Float32:
        """The embeddings of tokens plus what the rows' adapters add to them."""
        for row, uses in enumerate(self._uses):
            for use in uses:
                if pair := cast(LoraWeights, use.handle).pairs.get(EMBEDDING):
                    x[row] += np.float32(pair.scale * use.scale) * (pair.b @ pair.a[:, tokens[row]])
        return x

    def __getitem__(self, name: str) -> Float32:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def adapted_weights(weights: Mapping[str, Float32], batch: Batch) -> Mapping[str, Float32]:
    """The weights as the rows of a batch meet them."""
    if not batch.adapters:
        return weights
    lengths = np.diff(batch.row_starts)
    of_rows = [uses for uses, count in zip(batch.adapters, lengths, strict=True) for _ in range(count)]
    return AdaptedWeights(weights, tuple(of_rows))


def adapted_head(weights: Mapping[str, Float32], hidden: Float32, logits: Float32) -> Float32:
    """Logits plus what the rows' adapters add to them."""
    uses = head_adapters(hidden)
    return AdaptedWeights(weights, uses).added(HEAD, np.asarray(hidden), logits) if uses else logits
