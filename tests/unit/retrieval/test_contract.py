"""What every store promises: the same tests for the embedded one and for Milvus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.errors import RetrievalError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.types import Document, Tuning
from tests.unit.retrieval.test_filters import FILTERS, ROWS
from tests.unit.retrieval.words import WordEmbedder, clustered, entry

Opener = Callable[[], Retriever]
UNQUOTED = dict.fromkeys(map(ord, '"\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}'))


@pytest.fixture(params=["embedded", "milvus"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again; the test closes it."""
    if request.param == "embedded":
        yield lambda: EmbeddedIndex(tmp_path / "c")
        return
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    from kvarn.retrieval.milvus import MilvusIndex

    yield lambda: MilvusIndex(str(tmp_path / "c.db"), "c")


def test_documents_are_found_changed_and_removed(opener: Opener) -> None:
    with Collection("c", model=WordEmbedder(), index=opener()) as collection:
        assert collection.search("mill") == []
        collection.add([Document("a mill grinds grain", id="mill", source="a/mill.txt", metadata={"n": 1})])
        collection.add([Document("stars shine at night", id="stars", source="b/stars.txt")])
        for mode in ("hybrid", "dense", "sparse"):
            hit = collection.search("mill grinds", 1, mode)[0]  # type: ignore[arg-type]
            assert (hit.id, hit.span, hit.source, hit.metadata) == ("mill#0", (0, 19), "a/mill.txt", {"n": 1})
        version = collection.version
        assert collection.add([Document("a mill grinds grain", id="copy", metadata={"n": 1})]).duplicates == {
            "copy": "mill"
        }
        assert collection.version == version
        assert collection.add([Document("a harbour has ships", id="mill", source="a/mill.txt")]).updated == 1
        assert collection.version > version
        assert collection.search("grain", 5, "sparse") == []
        assert collection.ids_from("a") == ["mill"]
        assert collection.delete(["mill", "nope"]) == 1
        assert [one["id"] for one in collection.documents()] == ["stars"]


def test_a_store_is_the_same_after_reopening(opener: Opener) -> None:
    with Collection("c", model=WordEmbedder(), index=opener()) as collection:
        collection.add([Document(f"text {n} about item{n}", id=f"d{n}") for n in range(20)])
        before = collection.search("item7 text", 5, tuning=Tuning(mmr=0.7))
    with Collection("c", model=WordEmbedder(), index=opener()) as collection:
        after = collection.search("item7 text", 5, tuning=Tuning(mmr=0.7))
        assert [hit.id for hit in after] == [hit.id for hit in before]
        assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before])
        assert collection.stats()["chunks"] == 20
    with Collection("c", model=WordEmbedder(salt="other"), index=opener()) as collection, pytest.raises(RetrievalError):
        collection.search("item7")


def test_hits_know_their_lines_and_pages(opener: Opener) -> None:
    documents = [
        Document("one\n\ntwo words\nthree", id="text", metadata={"n": 1}),
        Document("first\n\n\fsecond", id="pdf", kind="pdf"),
        Document("# Head\n\nbody", id="word", kind="docx"),
    ]
    with Collection("c", model=WordEmbedder(), index=opener()) as collection:
        collection.add(documents)
        hits = {hit.document: hit for hit in collection.search("one first body", 10)}
        assert {id_: (hit.lines, hit.page) for id_, hit in hits.items()} == {
            "text": ((1, 4), None),
            "pdf": (None, 1),
            "word": (None, None),
        }
        assert hits["text"].metadata == {"n": 1}
        assert [hits[name].place for name in ("text", "pdf")] == ["text:1-4", "pdf, pages 1-2"]
        assert {one["id"]: one["metadata"] for one in collection.documents()}["text"] == {"n": 1}


def test_filters_mean_the_same(opener: Opener) -> None:
    index = opener()
    index.put([entry(number, np.ones(2, np.float32), **row) for number, row in enumerate(ROWS)])
    for given, expected in FILTERS:
        found = [key for key, _ in index.dense(np.ones(2, np.float32), 10, parse_filter(given))]
        assert {int(index.store.chunks([key])[key].document[1:]) for key in found} == expected, given
    index.close()


def test_the_nearest_are_found_with_their_cosines(opener: Opener) -> None:
    vectors = clustered(300, 24)
    index = opener()
    index.put([entry(n, vectors[n], f"common word{n}", group=n % 3) for n in range(300)])
    for query in clustered(5, 24, seed=3):
        best = np.argsort(-(vectors @ query))[:5]
        found = index.dense(query, 5, None)
        assert [index.store.chunks([key])[key].document for key, _ in found] == [f"d{n}" for n in best]
        assert [score for _, score in found] == pytest.approx([float(vectors[n] @ query) for n in best], abs=1e-4)
        assert len(index.dense(query, 100, parse_filter({"group": 1}))) == 100
    (key, score), *_ = index.sparse("word42", 3, None)
    assert index.store.chunks([key])[key].document == "d42"
    assert score == pytest.approx(_alone(300), rel=0.02)
    with pytest.raises(RetrievalError, match="dimensions"):
        index.put([entry(999, np.ones(7, np.float32))])
    index.close()


def test_a_document_is_found_by_the_name_of_its_file(opener: Opener) -> None:
    with Collection("c", model=WordEmbedder(), index=opener()) as collection:
        paths = ("docs/harbourGuide.md", "a/wheel")
        collection.add([Document(f"stars shine {n}", id=path, source=path) for n, path in enumerate(paths)])
        for query in ("harbour", "guide", "wheel"):
            assert len(collection.search(query, 5, "sparse")) == 1
        assert not collection.search("docs md", 5, "sparse")
        collection.rename({"docs/harbourGuide.md": "docs/mill.md"})
        assert not collection.search("harbour", 5, "sparse")
        assert [hit.source for hit in collection.search("mill", 5, "sparse")] == ["docs/mill.md"]
        assert collection.rename({"docs/mill.md": "b/stone.txt"})
        assert collection.delete(["b/stone.txt"]) == 1
        assert not collection.search("stone", 5, "sparse")
        assert len(collection.search("stars", 5, "sparse")) == 1


@pytest.mark.parametrize(
    "query", ['"stone wheel" mill', "\N{LEFT DOUBLE QUOTATION MARK}stone wheels\N{RIGHT DOUBLE QUOTATION MARK} mill"]
)
def test_chunks_that_have_a_quoted_phrase_come_first(opener: Opener, query: str) -> None:
    texts = [f"the wheel of this mill is of stone {n}" if n < 5 else f"stars shine {n}" for n in range(30)]
    with Collection("c", model=WordEmbedder(256), index=opener()) as collection:
        collection.add([*texts, Document("this mill in more of such words has the stone wheel of it", id="phrase")])
        for mode in ("hybrid", "sparse"):
            words = Tuning(weights=(0.0, 1.0))
            plain = collection.search(query.translate(UNQUOTED), 6, mode, tuning=words)  # type: ignore[arg-type]
            quoted = collection.search(query, 6, mode, tuning=words)  # type: ignore[arg-type]
            assert plain[0].document != "phrase" == quoted[0].document
        others = {hit.id: hit.score for hit in plain if hit.document != "phrase"}  # by words: a phrase lowers none
        assert {hit.id: hit.score for hit in quoted[1:]} == pytest.approx(others, rel=1e-4)


def _alone(num: int) -> float:
    """BM25 of a term that one of num equally long chunks has once."""
    return float(np.log(1 + (num - 0.5) / 1.5))


def test_the_reported_documents_are_plain_data(opener: Opener) -> None:
    index = opener()
    index.put([entry(1, np.ones(2, np.float32), lang="en")])
    expected: list[dict[str, Any]] = [{"id": "d1", "source": "folder/1.txt", "metadata": {"lang": "en"}, "chunks": 1}]
    assert index.store.documents() == expected
    index.store.set_meta({"a": b"\x00\x01", "b": 7})
    assert (index.store.meta("a"), index.store.meta("b"), index.store.meta("c", "none")) == (b"\x00\x01", 7, "none")
    index.close()
