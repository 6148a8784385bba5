"""The relevance of hits: a share beside the score that is low where a collection has nothing to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.citations.types import Grounded
from kvarn.models.spec import Autoregressive, InputEmbedding, ModelSpec
from kvarn.prompts import with_constraint
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.relevance import RelevanceModel, unknown_share
from kvarn.retrieval.types import Mode, Tuning
from kvarn.structured.constraints import Regex
from kvarn.types import SamplingParams
from tests.unit.retrieval.words import WordEmbedder

SPEC = ModelSpec(
    architecture="llama",
    name="tiny",
    width=8,
    vocab_size=16,
    context_length=64,
    embedding=InputEmbedding(),
    blocks=(),
    output_norm=None,
    head=None,
    generation=Autoregressive(),
)
TEXTS = [f"chunk {n} tells of mills, grain and water" for n in range(40)]


def test_what_is_there_is_relevant_and_what_is_not_is_not(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder(256)) as collection:
        collection.add([*TEXTS, "a gyroscope keeps its axis"])
        (best,) = collection.search("a gyroscope keeps its axis", 1)
        assert best.relevance is not None
        assert best.relevance > 0.9
        others = collection.search("which currency has norway", 10)
        assert max(hit.relevance or 0.0 for hit in others) < 0.1


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_relevance_is_told_where_a_query_has_a_vector_and_never_reorders(tmp_path: Path, mode: Mode) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(TEXTS)
        hits = collection.search("mills and grain", 5, mode)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert all((hit.relevance is None) == (mode == "sparse") for hit in hits)


def test_relevance_does_not_depend_on_fusion_or_k(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(TEXTS)
        by_id = {hit.id: hit.relevance for hit in collection.search("water of chunk 7", 40)}
        for tuning in (Tuning(), Tuning(fusion="rrf")):
            for hit in collection.search("water of chunk 7", 3, tuning=tuning):
                assert hit.relevance == pytest.approx(by_id[hit.id], abs=1e-6)


def test_words_that_nobody_wrote_are_unknown(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(TEXTS)
        assert unknown_share(collection._index, "mills and water") == 0.0
        assert unknown_share(collection._index, "gyroscopes") == 1.0
        assert 0.5 < unknown_share(collection._index, "mills of gyroscopes") < 1.0
        assert unknown_share(collection._index, "") == 0.0


def test_evidence_raises_relevance_and_unknown_words_lower_it() -> None:
    model = RelevanceModel()
    assert 0 < model.relevance(0.0, 0.0, 0.0) < model.relevance(0.4, 0.0, 0.0) < model.relevance(0.4, 0.4, 0.0) < 1
    assert model.relevance(0.4, 0.4, 0.5) < model.relevance(0.4, 0.4, 0.0)


def test_a_form_of_the_answer_gives_way_to_what_the_caller_asked_for() -> None:
    grounded = Grounded([], (), constraint=Regex("no"))
    assert with_constraint(SamplingParams(), grounded, SPEC).constraint == Regex("no")
    for params in (SamplingParams(constraint=Regex("yes")), SamplingParams(ignore_eos=True)):
        assert with_constraint(params, grounded, SPEC) == params
    assert with_constraint(SamplingParams(), Grounded([], ()), SPEC).constraint is None
