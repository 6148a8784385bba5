"""Sources in a prompt: whole, within the budget, in an order that repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.errors import InvalidParameter
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.rag_prompt import NO_SOURCES, fit, last_question, with_sources
from kvarn.retrieval.types import Document, Hit
from tests.unit.retrieval.words import WordEmbedder


def _count(text: str) -> int:
    return len(text.split())


def _hit(name: str, score: float, num_words: int = 8) -> Hit:
    text = " ".join([name] * num_words)
    return Hit(f"{name}#0", text, score, f"{name}.txt", (0, len(text)), name)


def test_the_same_hits_in_another_order_give_the_same_prompt() -> None:
    hits = [_hit("b", 0.9), _hit("a", 0.8), _hit("c", 0.1)]
    chosen, _ = fit(hits, 100, _count)
    again, _ = fit(hits[::-1], 100, _count)
    assert chosen == again == sorted(hits, key=lambda hit: hit.document)


def test_what_does_not_fit_is_left_out_whole_and_told() -> None:
    hits = [_hit("b", 0.9), _hit("big", 0.8, 500), _hit("a", 0.7)]
    chosen, left_out = fit(hits, 30, _count)
    assert [hit.document for hit in chosen] == ["a", "b"]
    assert [hit.document for hit in left_out] == ["big"]


def test_a_budget_too_small_for_the_best_source_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidParameter, match="502 tokens and the budget for sources is 30"):
        fit([_hit("big", 0.8, 500)], 30, _count)


def test_sources_stand_in_front_of_the_last_question() -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
    plain = with_sources([system, first, {"role": "user", "content": "why?"}], [_hit("a", 1.0)])
    assert plain[:2] == [system, first]
    assert plain[2]["content"].startswith("Sources:\n\n[1] a.txt\n")
    assert plain[2]["content"].endswith("\n\nwhy?")
    parts = with_sources([{"role": "user", "content": [{"type": "text", "text": "why?"}]}], [_hit("a", 1.0)])
    assert [part["text"][:8] for part in parts[0]["content"]] == ["Sources:", "why?"]
    assert with_sources([first], []) == [{"role": "user", "content": f"{NO_SOURCES}\n\nhello"}]


def test_the_question_is_what_the_user_said_last() -> None:
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": [{"type": "text", "text": "second"}]},
    ]
    assert last_question(talk) == "second"
    with pytest.raises(InvalidParameter, match="no message of the user"):
        last_question([{"role": "system", "content": "x"}])


def test_a_collection_grounds_a_conversation(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document("a mill grinds grain", id="mill"), Document("stars shine", id="stars")])
        grounded = collection.grounding(k=1).ground([{"role": "user", "content": "what grinds grain?"}], _count, 2048)
        (citation,) = grounded.citations
        assert (citation.number, citation.id, citation.span) == (1, "mill#0", (0, 19))
        assert "a mill grinds grain" in grounded.messages[0]["content"]
        assert citation.marked("As [1] says").is_cited
        assert not citation.marked("Nothing.").is_cited


@pytest.mark.parametrize("options", [{"k": 0}, {"budget": 0}, {"budget": "many"}, {"mode": "magic"}])
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection, pytest.raises(InvalidParameter):
        collection.grounding(**options)
