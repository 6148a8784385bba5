"""Scores and embeddings over FakeBackend: values, chunks, and blocks given back."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.engine.embed_score import embed_group, groups, score_tokens
from kvarn.engine.engine import Engine
from kvarn.errors import BackendError, CapacityError
from kvarn.models.spec import Pooling
from kvarn.types import SamplingParams
from tests.unit.engine.fake import complete, make_engine

TOKENS = [(7 * i) % 250 + 1 for i in range(50)]


def test_scores_do_not_depend_on_the_chunk() -> None:
    engine = make_engine()
    scores = [score_tokens(engine.backend, engine.kv, TOKENS, chunk) for chunk in (1, 7, 16, 100)]
    assert all(np.array_equal(scores[0], other) for other in scores[1:])
    assert scores[0].shape == (49,)
    assert engine.kv.num_free == engine.kv.num_blocks


def test_the_scores_of_an_answer_are_its_logprobs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=0, ignore_eos=True)
    completion = complete(make_engine(), TOKENS, params)
    engine = make_engine()
    scores = score_tokens(engine.backend, engine.kv, [*TOKENS, *completion.token_ids], 16)
    assert scores[-10:].tolist() == [entry.logprob for entry in completion.logprobs or ()]


@pytest.mark.parametrize("token_ids", [[], [5]])
def test_fewer_than_two_tokens_have_no_scores(token_ids: list[int]) -> None:
    engine = make_engine()
    assert score_tokens(engine.backend, engine.kv, token_ids, 16).shape == (0,)


def test_scores_that_are_not_numbers_are_an_error_and_blocks_come_back() -> None:
    engine = make_engine(faults={1: "nan"})
    with pytest.raises(BackendError):
        score_tokens(engine.backend, engine.kv, TOKENS, 16)
    assert engine.kv.num_free == engine.kv.num_blocks


def test_too_many_tokens_to_score_are_a_capacity_error_and_blocks_come_back() -> None:
    engine = make_engine(num_blocks=5)
    with pytest.raises(CapacityError):
        score_tokens(engine.backend, engine.kv, TOKENS, 16)
    assert engine.kv.num_free == engine.kv.num_blocks


def embedded(engine: Engine, texts: list[list[int]], pooling: Pooling, max_tokens: int) -> np.ndarray:
    parts = [embed_group(engine.backend, engine.kv, group, pooling) for group in groups(engine.kv, texts, max_tokens)]
    return np.concatenate(parts)


def test_embeddings_do_not_depend_on_which_texts_share_a_batch() -> None:
    texts = [TOKENS[:n] for n in (3, 9, 1, 16, 5, 2)]
    engine = make_engine()
    together = embedded(engine, texts, "mean", 16)
    alone = [embedded(engine, [text], "mean", 16)[0] for text in texts]
    assert np.array_equal(together, np.array(alone))
    assert engine.kv.num_free == engine.kv.num_blocks


def test_embedding_batches_never_exceed_the_cache() -> None:
    engine = make_engine(num_blocks=4)
    texts = [[1]] * 30
    assert embedded(engine, texts, "last", 100).shape == (30, 256)
    assert max(engine.backend.batch_sizes) == 4  # type: ignore[attr-defined]
