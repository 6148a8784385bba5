"""Sentences of an answer and the sources that support them: found by words and meaning, not by what the model says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvarn.citations.types import Grounded, SentenceSupport
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.attribution import MAX_CLAIMS, SupportModel, fitting, source_attributor
from kvarn.retrieval.search.sentences import sentence_spans, without_markers
from kvarn.retrieval.types import Document
from tests.unit.retrieval.words import WordEmbedder

MILL = "Mills are old. A mill grinds 40 sacks of grain a day with heavy stones. Water drives it."
STARS = "Astronomers count stars with telescopes on mountains."


def _grounded(folder: Path) -> Grounded:
    with Collection("c", folder=folder, model=WordEmbedder(256)) as collection:
        collection.add([Document(MILL, id="mill"), Document(STARS, id="stars"), Document("Salt dissolves.", id="salt")])
        asked = [{"role": "user", "content": "How much grain does a mill grind, and who counts stars?"}]
        return collection.grounding(k=2, min_relevance=0.0).ground(asked, lambda text: len(text.split()), 4096)


def _numbers(support: SentenceSupport) -> set[str]:
    return {str(passage.number) for passage in support.passages}


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It takes 0.5 s, e.g. here. Then more", ["It takes 0.5 s, e.g. here.", "Then more"]),
        ("A mill. [1] Stars. [2][1]", ["A mill. [1]", "Stars. [2][1]"]),
        ("Files:\n1. `a.json`\n2. `b.json`\n\n- c", ["Files:", "`a.json`", "`b.json`", "c"]),
        ("wrapped\ntext goes on", ["wrapped\ntext goes on"]),
        ("風車は回る。星は光る。", ["風車は回る。", "星は光る。"]),
        ("1.", []),
        (" \n", []),
    ],
)
def test_a_text_is_cut_into_sentences(text: str, sentences: list[str]) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


def test_numbers_of_sources_are_no_part_of_a_sentence() -> None:
    assert without_markers("A mill [1] grinds. [2][3]") == "A mill grinds."
    assert without_markers("A \n\t[1]  mill[2] [x] 1]") == "A  mill [x] 1]"


@pytest.mark.parametrize("part", [" ", "\n ", ".]", ". [1", "[1] ", "!\t", "1"])
def test_an_answer_is_read_in_time_that_grows_with_its_length(part: str) -> None:
    answer, began = "A mill." + part * 200_000 + "b", time.process_time()
    for start, end in sentence_spans(answer):
        without_markers(answer[start:end])
    assert time.process_time() - began < 10, "half a minute and more where each blank looked at all that follow"


def test_a_source_is_cited_for_what_it_says_whatever_number_the_answer_names(tmp_path: Path) -> None:
    grounded = _grounded(tmp_path)
    number = {citation.document: str(citation.number) for citation in grounded.citations}
    answer = f"A mill grinds 40 sacks of grain a day. [{number['stars']}] Elephants eat bananas. [{number['mill']}]"
    first, second = grounded.attributed(answer)
    assert _numbers(first) == {number["mill"]}
    assert answer[slice(*first.span)].startswith("A mill grinds")
    assert not second.is_supported
    marked = {citation.document: citation.is_cited for citation in grounded.cited((first, second))}
    assert marked == {"mill": True, "stars": False}


def test_the_passage_is_the_sentence_of_the_document_that_says_it(tmp_path: Path) -> None:
    (support,) = _grounded(tmp_path).attributed("Mills grind 40 sacks of grain a day.")
    (passage,) = support.passages
    assert MILL[slice(*passage.span)] == "A mill grinds 40 sacks of grain a day with heavy stones."
    assert 1 >= passage.score == support.score > 0.5


def test_a_number_that_no_source_has_makes_a_sentence_less_supported(tmp_path: Path) -> None:
    grounded = _grounded(tmp_path)
    (right,) = grounded.attributed("A mill grinds 40 sacks of grain a day.")
    (wrong,) = grounded.attributed("A mill grinds 9000 sacks of grain a day.")
    assert wrong.score < right.score - 0.1


def test_what_says_nothing_is_no_sentence(tmp_path: Path) -> None:
    grounded = _grounded(tmp_path)
    assert grounded.attributed("") == grounded.attributed("[1] [2]") == grounded.attributed("It is.") == ()
    assert grounded.attributed("The mills of this book are:") == ()


def test_only_the_first_sentences_of_an_endless_answer_are_looked_at(tmp_path: Path) -> None:
    assert len(_grounded(tmp_path).attributed("A mill grinds grain. " * 2_000)) == MAX_CLAIMS


def test_without_sources_nothing_is_attributed() -> None:
    assert Grounded([], ()).attributed("A mill grinds grain.") == ()


def test_rare_words_weigh_more_than_common_ones(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([f"the server answers question {n}" for n in range(40)] + ["a gyroscope turns"])
        hits = collection.search("gyroscope server", 2, "sparse")
        attributor = source_attributor(collection._index, "which?", hits, collection.embedder)
        assert attributor.rarity["gyroscop"] > 5 * attributor.rarity["server"]
        assert attributor.max_rarity >= attributor.rarity["gyroscop"]


def test_a_text_too_long_to_embed_is_cut() -> None:
    embedder = WordEmbedder()
    assert embedder.count(fitting(embedder, "word " * 10_000)) <= embedder.max_tokens
    assert fitting(embedder, "short") == "short"


def test_support_is_a_share_that_grows_with_the_evidence() -> None:
    model = SupportModel()
    nothing, half, all_ = (model.score((share, share, share)) for share in (0.0, 0.5, 1.0))
    assert 0 < nothing < half < all_ < 1
