"""The dense index against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import RetrievalError
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.storage.hnsw import DenseIndex
from kvarn.retrieval.types import Scored
from tests.conftest import Size
from tests.unit.retrieval.words import Float32, clustered, entry, unit


def test_recall_at_10_is_at_least_98_percent(tmp_path: Path, size: Size) -> None:
    num = size(5_000, 20_000)
    vectors = clustered(num + 100)
    index = _filled(tmp_path, vectors[:num])
    nearest = np.argsort(-(vectors[num:] @ vectors[:num].T), axis=1)[:, :10]
    found = [_documents(index, index.dense(query, 10, None)) for query in vectors[num:]]
    assert np.mean([len(mine & set(best)) / 10 for mine, best in zip(found, nearest, strict=True)]) >= 0.98
    index.close()


def test_scores_are_exact_cosines(tmp_path: Path) -> None:
    vectors = clustered(500, 48)
    index = _filled(tmp_path, vectors)
    for key, score in index.dense(vectors[7], 10, None):
        assert score == pytest.approx(float(index.store.vectors([key])[key] @ vectors[7]), abs=1e-6)
    index.close()


def test_two_builds_are_identical(tmp_path: Path) -> None:
    vectors = clustered(1_500, 48)
    files = []
    for name in ("one", "two"):
        _filled(tmp_path / name, vectors).close()
        files.append(next((tmp_path / name).glob("dense-*")).read_bytes())
    assert files[0] == files[1]


def test_another_seed_gives_another_graph(tmp_path: Path) -> None:
    vectors = clustered(500, 48)
    files = []
    for seed in (0, 1):
        _filled(tmp_path / str(seed), vectors, seed=seed).close()
        files.append(next((tmp_path / str(seed)).glob("dense-*")).read_bytes())
    assert files[0] != files[1]


@pytest.mark.parametrize("limit", [3, 20, 300, 1_999])
def test_a_filter_never_returns_fewer_than_k_hits_while_k_match(tmp_path: Path, limit: int) -> None:
    vectors = clustered(2_000, 32)
    index = _filled(tmp_path, vectors)
    where = parse_filter({"group": {"lt": limit}})
    for query in clustered(20, 32, seed=1):
        assert len(index.dense(query, 15, where)) == min(15, limit)
    index.close()


def test_filtered_hits_are_the_nearest_that_match(tmp_path: Path) -> None:
    vectors = clustered(2_000, 32)
    index = _filled(tmp_path, vectors)
    where = parse_filter({"group": {"gte": 1_950}})
    for query in clustered(10, 32, seed=2):
        best = 1_950 + np.argsort(-(vectors[1_950:] @ query))[:5]
        keys = [key for key, _ in index.dense(query, 5, where)]
        assert [index.store.chunks([key])[key].document for key in keys] == [f"d{n}" for n in best]
    index.close()


def test_a_removed_document_is_not_found(tmp_path: Path) -> None:
    vectors = clustered(300, 32)
    index = _filled(tmp_path, vectors)
    assert index.remove(["d5", "d6", "missing"]) == 2
    documents = {index.store.chunks([key])[key].document for key, _ in index.dense(vectors[5], 50, None)}
    assert not {"d5", "d6"} & documents
    assert len(documents) == 50
    index.check()
    index.close()


def test_everything_is_found_whatever_was_replaced() -> None:
    rng, vectors = np.random.default_rng(0), dict[int, Float32]()
    index = DenseIndex(16, 0, lambda keys: {key: vectors[key] for key in keys})
    centres = rng.standard_normal((3, 16))
    for begin in range(0, 6_000, 60):  # many near to each other, all replaced a hundred times
        index.remove(list(vectors))
        new = unit(rng.integers(1, 12, (60, 3)) @ centres + 1e-3 * rng.standard_normal((60, 16)))
        vectors.clear()
        vectors.update(zip(range(begin, begin + 60), new, strict=True))
        index.add(list(vectors), new)
    query = unit(centres[:1])[0]
    assert set(index.nearest(query, 60).keys.tolist()) == vectors.keys()
    best = sorted(vectors, key=lambda key: -float(vectors[key] @ query))
    assert [key for key, _ in index.search(query, 10)] == best[:10]


def test_a_vector_of_another_length_is_refused(tmp_path: Path) -> None:
    index = _filled(tmp_path, clustered(10, 32))
    with pytest.raises(RetrievalError, match="16 dimensions, the collection's have 32"):
        index.dense(np.ones(16, np.float32), 3, None)
    with pytest.raises(RetrievalError, match="16 and 32 dimensions"):
        index.put([entry(99, unit(np.ones((1, 16)))[0])])
    assert index.num_chunks == 10
    index.close()


def _documents(index: EmbeddedIndex, scored: Sequence[Scored]) -> set[int]:
    """The numbers of the documents of chunks."""
    chunks = index.store.chunks([key for key, _ in scored])
    return {int(chunk.document[1:]) for chunk in chunks.values()}


def _filled(folder: Path, vectors: Float32, seed: int = 0) -> EmbeddedIndex:
    index = EmbeddedIndex(folder, seed=seed)
    for start in range(0, len(vectors), 500):
        numbers = range(start, min(start + 500, len(vectors)))
        index.put([entry(n, vectors[n], group=n) for n in numbers])
    return index
