"""Scores of chunks for one query, as arrays, and the scales they are measured by. Knows no index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvarn.retrieval.types import Scored

Float64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.int64]  # of chunks
MIN_ROOM = 0.05  # between the mean of a query's cosines and 1


@dataclass(frozen=True, slots=True)
class Scores:
    """Chunks with one kind of score: cosines or BM25. A key is in it once."""

    keys: Keys
    values: Float64

    @staticmethod
    def of(scored: Sequence[Scored]) -> Scores:
        return Scores(np.array([key for key, _ in scored], np.int64), np.array([one for _, one in scored], np.float64))

    def __len__(self) -> int:
        return len(self.keys)

    def pairs(self) -> list[Scored]:
        return list(zip(self.keys.tolist(), self.values.tolist(), strict=True))

    def by_key(self) -> dict[int, float]:
        return dict(zip(self.keys.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ChunkCandidates:
    """The best chunks by meaning and the best by words; what is not among the one kind has its limit at most."""

    cosines: Scores
    bm25: Scores
    max_other_cosine: float
    max_other_bm25: float


@dataclass(frozen=True, slots=True)
class Scales:
    """What the scores of a query are measured by: the same for all candidates, however many they are."""

    mean: float  # of its cosines with any chunks of the collection, whether they answer it or not
    bm25: float  # of a chunk that would consist of the query's words

    @overload
    def shares(self, cosine: float, bm25: float) -> tuple[float, float]: ...

    @overload
    def shares(self, cosine: Float64, bm25: Float64) -> tuple[Float64, Float64]: ...

    def shares(self, cosine: Any, bm25: Any) -> tuple[Any, Any]:
        """How far chunks have come from nothing special to equal, by meaning and by words.

        Quoted phrases add to BM25, and not to its scale: they lift a chunk, and lower none.
        """
        by_meaning = (cosine - self.mean) / max(1.0 - self.mean, MIN_ROOM)
        return by_meaning, np.minimum(bm25 / self.bm25, 1.0) if self.bm25 else bm25 * 0.0
