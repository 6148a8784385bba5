"""The dense index of one collection: an HNSW graph of unit vectors (usearch).

Built by one thread, so that equal builds give equal files. The graph holds bf16; the best candidates are rescored from
the f32 vectors of the document store. Knows keys and vectors; knows no texts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.scores import Keys, Scores
from kvarn.retrieval.top_k import top_k
from kvarn.retrieval.types import Float32, Scored

CONNECTIVITY = 16  # edges of a node; twice as many on the lowest level
EXPANSION_ADD = 128
EXPANSION_SEARCH = 96
ADD_BATCH = 256  # vectors added under the lock at once: how long a search may wait
MIN_RESCORED = 20  # candidates beyond k that are rescored; k of them if k is larger
MAX_SCANNED = 4096  # vectors that are all compared: as fast, and a graph loses some when near ones are replaced
EXACT_SHARE = 0.1  # filters that match a smaller share are scanned exactly
NOTHING = Scores(np.empty(0, np.int64), np.empty(0, np.float64))
Vectors = Callable[[Sequence[int]], Mapping[int, Float32]]


class DenseIndex:
    """Nearest neighbours by cosine. Searches may come from several threads, changes from one at a time."""

    def __init__(self, dim: int, seed: int, vectors: Vectors) -> None:
        self.dim = dim
        self._seed = seed
        self._vectors = vectors
        self._lock = threading.RLock()
        self._graph = _new_graph(dim)

    def __len__(self) -> int:
        return len(self._graph)

    def load(self, path: Path) -> None:
        """Load a saved graph; raises what usearch raises, or ValueError if its dimensions differ."""
        graph = require("usearch.index").Index.restore(str(path))
        if graph is None or graph.ndim != self.dim:
            raise ValueError(f"{path} holds no graph of {self.dim} dimensions")
        graph.expansion_add, graph.expansion_search = EXPANSION_ADD, EXPANSION_SEARCH
        self._graph = graph

    def save(self, path: Path) -> None:
        """Write the graph to a temporary file, then rename that."""
        partial = path.with_suffix(".part")
        try:
            with self._lock:
                self._graph.save(str(partial))
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path} cannot be written: {error}; nothing is lost, free the disk") from error

    def add(self, keys: Sequence[int], vectors: Float32) -> None:
        """Insert vectors, in an order drawn from the seed and the first key; known keys are replaced."""
        if not len(keys):
            return
        order = np.random.default_rng([self._seed, int(keys[0])]).permutation(len(keys))
        shuffled = np.asarray(keys, np.uint64)[order]
        for start in range(0, len(order), ADD_BATCH):
            batch = shuffled[start : start + ADD_BATCH]
            with self._lock:
                self._drop(batch)
                self._graph.add(batch, vectors[order[start : start + ADD_BATCH]], threads=1)

    def remove(self, keys: Sequence[int]) -> None:
        """Remove vectors from the graph."""
        with self._lock:
            self._drop(np.asarray(keys, np.uint64))

    def search(self, query: Float32, k: int, allowed: Sequence[int] | None = None) -> list[Scored]:
        """The k nearest, best first; only among the allowed keys if they are given."""
        if allowed is None:
            return self._rescored(query, self._nearest(query, _num_rescored(k)), k)
        if len(allowed) > EXACT_SHARE * len(self):
            num_rescored = _num_rescored(k)
            num_fetched = min(len(self), 2 * num_rescored * len(self) // len(allowed))
            allowed_keys = set(allowed)
            found = [key for key in self._nearest(query, num_fetched) if key in allowed_keys]
            if len(found) >= num_rescored:
                return self._rescored(query, found[:num_rescored], k)
        return self._scan(query, allowed, k)

    def nearest(self, query: Float32, count: int, allowed: Sequence[int] | None = None) -> Scores:
        """The nearest, best first, in the graph's precision; only among the allowed ones if they are given."""
        if allowed is not None:
            found = self.cosines(query, np.array([key for key, _ in self.search(query, count, allowed)], np.int64))
            order = np.argsort(-found.values, kind="stable")
            return Scores(found.keys[order], found.values[order])
        matches = self._matches(query, count)
        if matches is None:
            return NOTHING
        return Scores(matches.keys.astype(np.int64), 1.0 - matches.distances.astype(np.float64))

    def cosines(self, query: Float32, keys: Keys) -> Scores:
        """Cosines in the graph's precision, that of the query included; of those keys that it holds."""
        asked = keys.astype(np.uint64)
        with self._lock:
            held = asked[self._graph.contains(asked)] if len(asked) and len(self._graph) else asked[:0]
            vectors = self._of(held)
        return Scores(held.astype(np.int64), _cosines(vectors, _bf16(query)).astype(np.float64))

    def mean(self, count: int) -> Float32:
        """The mean of the vectors whose keys are evenly spread over all, (dim,)."""
        with self._lock:
            keys = np.sort(np.asarray(self._graph.keys, np.uint64)) if len(self._graph) else np.empty(0, np.uint64)
            spread = keys[np.linspace(0, len(keys) - 1, min(count, len(keys))).astype(int)] if len(keys) else keys
            vectors = self._of(spread)
        mean: Float32 = vectors.mean(axis=0) if len(vectors) else np.zeros(self.dim, np.float32)
        return mean

    def _of(self, keys: Any) -> Float32:
        """The vectors of keys that it holds, (n, dim), under the lock."""
        if not len(keys):
            return np.empty((0, self.dim), np.float32)
        vectors: Float32 = np.concatenate(self._graph.get(keys, np.float32), dtype=np.float32)
        return vectors.reshape(-1, self.dim)

    def _nearest(self, query: Float32, count: int) -> list[int]:
        matches = self._matches(query, count)
        return [] if matches is None else matches.keys.tolist()

    def _matches(self, query: Float32, count: int) -> Any:
        """What the graph finds, best first; None if it is empty."""
        with self._lock:
            if not len(self._graph):
                return None
            self._graph.expansion_search = max(EXPANSION_SEARCH, count)
            is_small = len(self._graph) <= MAX_SCANNED
            return self._graph.search(query, min(count, len(self._graph)), threads=1, exact=is_small)

    def _scan(self, query: Float32, allowed: Sequence[int], k: int) -> list[Scored]:
        """Score all allowed vectors in the graph's precision, then rescore the best of them exactly."""
        keys = np.asarray(allowed, np.uint64)
        with self._lock:
            keys = keys[self._graph.contains(keys)] if len(keys) else keys
            if not len(keys):
                return []
            scores = self._of(keys) @ query
        count = min(_num_rescored(k), len(keys))
        best = np.argpartition(-scores, count - 1)[:count]
        return self._rescored(query, [int(key) for key in keys[best]], k)

    def _rescored(self, query: Float32, keys: Sequence[int], k: int) -> list[Scored]:
        vectors = self._vectors(keys)
        if not vectors:
            return []
        scores = _cosines(np.array(list(vectors.values()), np.float32), query)
        return top_k(zip(vectors, scores.tolist(), strict=True), k)

    def _drop(self, keys: Any) -> None:
        known = keys[self._graph.contains(keys)] if len(keys) and len(self._graph) else keys[:0]
        for key in known:
            self._graph.remove(int(key))


def _cosines(vectors: Float32, query: Float32) -> Float32:
    """Row by row: in a matrix product the last bits of a row depend on how many there are."""
    cosines: Float32 = np.einsum("ij,j->i", vectors, query)
    return cosines


def _bf16(vector: Float32) -> Float32:
    """Rounded as the graph rounds what it is asked for."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _num_rescored(k: int) -> int:
    return k + max(k, MIN_RESCORED)


def _new_graph(dim: int) -> Any:
    return require("usearch.index").Index(
        ndim=dim,
        metric="ip",
        dtype="bf16",
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )
