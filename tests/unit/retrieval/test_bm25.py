"""BM25 against a plain implementation and against bm25s."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.search.search import highlights
from kvarn.retrieval.storage import bm25
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.text_analysis import quoted_phrases, terms
from kvarn.retrieval.types import Document
from tests.conftest import Size
from tests.unit.retrieval.words import WordEmbedder, entry

ONE = np.ones(1, np.float32)
# Lengths that one byte can stand for, as Lucene has them: exact to 40, then four bits of mantissa.
BYTES = [*range(32), *(24 + ((8 | i % 8) << i // 8 - 1) for i in range(8, 232))]


def test_scores_equal_a_plain_implementation(tmp_path: Path, size: Size) -> None:
    texts = _texts(size(400, 5_000))
    index = _filled(tmp_path, texts)
    plain = _Plain(_indexed(texts))
    for query in _queries(30):
        expected = sorted(plain.scores(query), reverse=True)[:10]
        found = [score for _, score in index.sparse(query, 10, None)]
        assert found == pytest.approx([score for score in expected if score > 0], rel=1e-4)
    index.close()


def test_hits_overlap_with_bm25s(tmp_path: Path, size: Size) -> None:
    bm25s = pytest.importorskip("bm25s")
    texts = _texts(size(400, 5_000))
    index = _filled(tmp_path, texts)
    peer = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    peer.index([terms(text) for text in _indexed(texts)], show_progress=False)
    overlaps = []
    for query in _queries(40):
        best, _ = peer.retrieve([terms(query)], k=10, show_progress=False, n_threads=1)
        mine = {key - 1 for key, _ in index.sparse(query, 10, None)}
        overlaps.append(len(mine & {int(number) for number in best[0]}) / 10)
    assert np.mean(overlaps) >= 0.95
    index.close()


def test_another_process_finds_what_a_rebuilt_index_holds(tmp_path: Path) -> None:
    documents = [{"text": f"mill number {n}", "id": f"d{n}"} for n in range(30)]
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(documents)
        with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as reader:
            assert len(reader.search("mill", 100, "sparse")) == 30
            collection.add([{"text": f"stone number {n}", "id": f"d{n}"} for n in range(10)])  # rebuilds, at its end
            assert len(reader.search("stone", 100, "sparse")) == 10
            collection.delete(["d3"])
            assert len(reader.search("stone", 100, "sparse")) == 9
            collection.optimise()
            collection.add("stone and mill")
            assert len(reader.search("stone", 100, "sparse")) == 10


def test_after_removals_and_optimise_scores_equal_a_fresh_build(tmp_path: Path) -> None:
    texts = _texts(200)
    used = _filled(tmp_path / "used", texts)
    used.remove([f"d{n}" for n in range(0, 200, 3)])
    used.optimise()
    fresh = _filled(tmp_path / "fresh", texts, skip=3)
    for query in _queries(20):
        mine = [(used.store.chunks([key])[key].document, score) for key, score in used.sparse(query, 10, None)]
        theirs = [(fresh.store.chunks([key])[key].document, score) for key, score in fresh.sparse(query, 10, None)]
        assert mine == theirs
    used.close()
    fresh.close()


@pytest.mark.parametrize("limit", [3, 30, 150, 400])
def test_a_filter_keeps_the_best_that_match(tmp_path: Path, limit: int) -> None:
    texts = _texts(400)
    index = _filled(tmp_path, texts)
    plain = _Plain(_indexed(texts))
    for query in _queries(10):
        expected = sorted((s for n, s in enumerate(plain.scores(query)) if n < limit and s > 0), reverse=True)[:10]
        found = index.sparse(query, 10, parse_filter({"place": {"lt": limit}}))
        assert [score for _, score in found] == pytest.approx(expected, rel=1e-4)
    index.close()


def test_a_query_without_words_finds_nothing(tmp_path: Path) -> None:
    index = _filled(tmp_path, _texts(5))
    assert index.sparse("?!", 10, None) == []
    assert index.sparse('"AND" OR (w1', 10, None) is not None  # no query language, nothing to escape
    index.close()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('grind "to be" and "To  be"', [("to", "be")]),
        ('a "mill" and «getFileName»', [("mill",), ("get", "file", "name")]),
        ('"one" "two', [("one",)]),
        ('"" "!" no', []),
        (" ".join(f'"n{n}"' for n in range(20)), [(f"n{n}",) for n in range(8)]),
        (f'"{"word " * 40}"', [("word",) * 32]),
    ],
)
def test_phrases_are_what_stands_in_quotation_marks(query: str, expected: list[tuple[str, ...]]) -> None:
    assert quoted_phrases(query) == expected


def test_many_quotation_marks_take_time_in_proportion() -> None:
    for text in (
        '"' * 32_768,
        "\N{LEFT DOUBLE QUOTATION MARK}" * 32_768,
        '"a' * 16_384,
        "«a" * 16_384,
    ):
        started = time.process_time()
        quoted_phrases(text)
        assert time.process_time() - started < 1.0


def test_a_quoted_word_counts_twice_and_a_phrase_as_another_word(tmp_path: Path) -> None:
    index = _filled(tmp_path, ["a mill grinds", "a mill of stone", "stone of a mill"])
    (_, plain), (_, twice) = index.sparse("grinds", 1, None)[0], index.sparse('"grinds"', 1, None)[0]
    assert twice == pytest.approx(2 * plain)
    asked = index.sparse('"mill of stone"', 3, None)
    assert asked[0][0] == 2
    assert dict(index.sparse("mill of stone", 3, None))[3] == pytest.approx(dict(asked)[3])
    keys = np.array([1, 2, 3])
    assert index._sync.sparse.scores('"mill of stone"', keys).by_key() == pytest.approx(dict(asked))
    index.close()


def test_an_index_without_positions_is_made_anew_once_and_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a mill of stone", "stone of a mill in words that are many more"]
    monkeypatch.setattr(bm25, "RECORD", "freq")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document(text, id=str(n)) for n, text in enumerate(texts)])
    monkeypatch.undo()
    phrase = '"stone of a mill"'
    with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as reader:
        assert [hit.id for hit in reader.search(phrase, 2, "sparse")] == ["0#0", "1#0"]
    folders = []
    for _ in range(2):
        with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
            assert [hit.id for hit in collection.search(phrase, 2, "sparse")] == ["1#0", "0#0"]
            folders.append([path.name for path in (tmp_path / "c").glob("sparse-*")])
    assert folders == [["sparse-1"]] * 2
    with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as reader:
        assert [hit.id for hit in reader.search(phrase, 2, "sparse")] == ["1#0", "0#0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Running runs", ["run", "run"]),
        ("getFileName HTTPServer", ["get", "file", "name", "http", "server"]),
        ("snake_case", ["snake", "case"]),
        ("ﬁle ＡＢＣ Straße", ["file", "abc", "strass"]),
        ("東京都庁", ["東京", "京都", "都庁"]),
        ("e\u0301te\u0301", ["été"]),
        ("x" * 65, []),
    ],
)
def test_words_are_normalised(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_highlights_mark_the_words_of_the_query() -> None:
    text = "The miller mills. A mill!"
    assert [text[a:b] for a, b in highlights(text, "mill")] == ["mills", "mill"]
    assert [text[a:b] for a, b in highlights(text, "what is a mill")] == ["mills", "mill"]  # "a" says nothing
    swedish = "Kvarnarna malde vid kvarnen."
    assert [swedish[a:b] for a, b in highlights(swedish, "kvarn", "swedish")] == ["Kvarnarna", "kvarnen"]


class _Plain:
    """BM25 as the papers write it, with lengths rounded as the index rounds them."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.documents = [Counter(terms(text)) for text in texts]
        self.lengths = [max(size for size in BYTES if size <= sum(words.values())) for words in self.documents]
        self.average = sum(sum(words.values()) for words in self.documents) / len(texts)
        self.frequency = Counter(term for words in self.documents for term in words)

    def scores(self, query: str) -> list[float]:
        return [self._score(Counter(terms(query)), number) for number in range(len(self.documents))]

    def _score(self, query: Counter[str], number: int) -> float:
        words, norm = self.documents[number], 1.2 * (0.25 + 0.75 * self.lengths[number] / self.average)
        return sum(self._idf(term) * times * words[term] * 2.2 / (words[term] + norm) for term, times in query.items())

    def _idf(self, term: str) -> float:
        n = self.frequency[term]
        return math.log(1 + (len(self.documents) - n + 0.5) / (n + 0.5))


def _texts(num: int) -> list[str]:
    """Words as frequent as in a language, texts of 5 to 120 words."""
    rng = np.random.default_rng(0)
    return [" ".join(f"w{min(w, 3000)}" for w in rng.zipf(1.3, rng.integers(5, 120))) for _ in range(num)]


def _indexed(texts: Sequence[str]) -> list[str]:
    """With the names of their files, folder/0.txt and so on."""
    return [f"{number} {text}" for number, text in enumerate(texts)]


def _queries(num: int) -> list[str]:
    rng = np.random.default_rng(1)
    return [" ".join(f"w{w}" for w in rng.integers(1, 60, rng.integers(1, 6))) for _ in range(num)]


def _filled(folder: Path, texts: Sequence[str], skip: int | None = None) -> EmbeddedIndex:
    index = EmbeddedIndex(folder)
    wanted = [n for n in range(len(texts)) if skip is None or n % skip]
    for start in range(0, len(wanted), 128):
        index.put([entry(n, ONE, texts[n], place=n) for n in wanted[start : start + 128]])
    return index
