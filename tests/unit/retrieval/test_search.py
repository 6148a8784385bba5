"""Searches: hits that do not depend on how many are asked for, languages, documents as units, and adding in bulk."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.storage import embedded_index
from kvarn.retrieval.text_analysis import detect_language, query_terms, terms
from kvarn.retrieval.types import Document, Fusion, Hit, Tuning
from tests.conftest import Size
from tests.unit.retrieval.words import WordEmbedder

WORDS = (
    *("mill", "grain", "flour", "stone", "wheel", "river", "bread", "oven", "salt"),
    *("water", "star", "lens", "night", "sky", "field", "wheat", "barley", "miller"),
)
SWEDISH = "Kvarnarna malde mjöl av säden och det var inte alltid en lätt sak för mjölnarna i byn."


@pytest.mark.parametrize("fusion", ["weighted", "rrf"])
def test_the_first_ten_are_the_same_for_every_k(tmp_path: Path, size: Size, fusion: Fusion) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 12)) + f" number{n}" for n in range(size(800, 4_000))]
    queries = [" ".join(rng.choice(WORDS, 3, replace=False)) for _ in range(size(60, 400))]
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(texts)
        ten, twenty, hundred = (collection.search_many(queries, k, tuning=Tuning(fusion=fusion)) for k in (10, 20, 100))
        for first, second, third in zip(ten, twenty, hundred, strict=True):
            assert first == second[:10] == third[:10]


def test_a_chunk_that_only_one_kind_of_search_finds_has_both_scores(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([f"{WORDS[n % 18]} {WORDS[n % 7]} n{n}" for n in range(100)])
        index = collection._index
        (vector,) = collection._indexer.embed_queries(["river bread"], collection.embedder)
        few, all_ = (index.candidates("river bread", vector, depth, None) for depth in (5, 100))
        assert len(few.cosines) == len(few.bm25) == 5 < len(all_.cosines) == 100
        cosines = all_.cosines.by_key()
        assert few.cosines.by_key() == pytest.approx({key: cosines[key] for key in few.cosines.keys.tolist()}, abs=1e-5)
        assert index.cosines(vector, few.bm25.keys).by_key() == pytest.approx(
            {key: cosines[key] for key in few.bm25.keys.tolist()}, abs=1e-5
        )
        assert index.bm25("river bread", all_.cosines.keys).by_key() == dict(index.sparse("river bread", 100, None))


def test_highlights_are_those_of_the_collections_language(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([SWEDISH])
        (hit,) = collection.search("var kvarnen i byn", 1, tuning=Tuning(highlights=True))
        assert [hit.text[a:b] for a, b in hit.highlights] == ["Kvarnarna", "byn"]


@pytest.mark.parametrize("fusion", ["weighted", "rrf"])
def test_the_best_chunks_of_documents_are_the_same_however_many_chunks_are_ranked(
    tmp_path: Path, fusion: Fusion
) -> None:
    long = "\n\n".join(f"The mill number {n} grinds grain {WORDS[n % 18]}." for n in range(120))
    with Collection("c", folder=tmp_path, model=WordEmbedder(), chunking=Chunking(8, 0)) as collection:
        collection.add([Document(long, id="long"), *(f"{word} of the mill" for word in WORDS), "grain of the mill"])
        ranked = collection.search("which mill grinds grain", 300, tuning=Tuning(fusion=fusion))
        for count in (1, 3):
            kept = {hit.id for name in {one.document for one in ranked} for hit in _of(ranked, name)[:count]}
            expected = [hit for hit in ranked if hit.id in kept]
            for k in (1, 4, 10):
                hits = collection.search("which mill grinds grain", k, tuning=Tuning(fusion=fusion, per_document=count))
                assert [hit.id for hit in hits] == [hit.id for hit in expected[:k]]


def _of(hits: Sequence[Hit], document: str) -> list[Hit]:
    return [hit for hit in hits if hit.document == document]


def test_a_document_may_be_limited_to_its_best_chunks(tmp_path: Path) -> None:
    long = "\n\n".join(f"The mill number {n} grinds grain." for n in range(40))
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document(long, id="long"), Document("A mill grinds.", id="short"), "Stars shine.", "Salt."])
        hits = collection.search("which mill grinds grain", 3, tuning=Tuning(per_document=1))
        assert len({hit.document for hit in hits}) == 3
        both = collection.search("which mill grinds grain", 10)
        assert max(both, key=lambda hit: hit.score).document == hits[0].document


def test_hits_below_the_least_score_are_left_out(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder(256)) as collection:
        collection.add([f"{word} {WORDS[n - 1]}" for n, word in enumerate(WORDS)])
        all_ = collection.search("mill grain", 18)
        bar = all_[2].score
        assert collection.search("mill grain", 18, tuning=Tuning(min_score=bar)) == [h for h in all_ if h.score >= bar]
        assert not collection.search("telescope galaxies", 18, tuning=Tuning(min_score=0.3))
        grounded = collection.grounding(tuning=Tuning(min_score=0.3)).ground(
            [{"role": "user", "content": "telescope galaxies"}], len, 100
        )
        assert not grounded.citations
        assert "No source was found" in str(grounded.messages)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (SWEDISH, "swedish"),
        ("Die Mühlen mahlten das Korn, und es war nicht immer leicht für die Müller.", "german"),
        ("The mills ground the grain, and it was not always easy for the millers.", "english"),
        ("def main(): return parse(arguments)", "english"),
        ("風車は穀物を挽く", "english"),
        ("", "english"),
    ],
)
def test_a_language_is_known_by_its_stop_words(text: str, language: str) -> None:
    assert detect_language([text]) == language


def test_long_words_are_not_remembered() -> None:
    tracemalloc.start()
    try:
        for number in range(20):
            text = str(number) * 100_000
            assert detect_language([text]) == "english"
            assert terms(text) == query_terms(text) == []
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000, f"{kept:,} bytes are held of words that nobody asks for again"


def test_words_are_stemmed_in_the_language_of_the_collection(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([SWEDISH])
        assert collection.search("kvarn", 1, "sparse")  # kvarnarna
        assert collection.stats()["language"] == "swedish"
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.search("mjölnare", 1, "sparse")


def test_a_collection_made_before_languages_were_stored_stays_english(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(["The mills are grinding."])
    with sqlite3.connect(tmp_path / "c" / "truth.sqlite") as store:
        store.execute("DELETE FROM facts WHERE name = 'language'")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([SWEDISH, "The mill grinds."])
        assert len(collection.search("grind", 5, "sparse")) == 2
        assert not collection.search("kvarn", 5, "sparse")
        collection.optimise()  # made anew, in the language that most of it is in
        assert collection.search("kvarn", 5, "sparse")


def test_stop_words_count_only_where_there_is_nothing_else() -> None:
    assert query_terms("what is in the mill") == ["what", "mill"]
    assert query_terms("to be or not to be") == terms("to be or not to be")


def test_what_was_added_in_bulk_is_found_and_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_index, "BULK_CHUNKS", 50)
    texts = [f"{WORDS[n % 18]} unique{n}" for n in range(700)]
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(texts)
        collection._index.check()  # type: ignore[attr-defined]
        assert collection.search("unique699", 1, "sparse")[0].text == texts[699]
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection._index.check()  # type: ignore[attr-defined]
        assert len(collection) == 700
