"""Constraints in a whole engine over FakeBackend: whatever the model wants to say, the answer follows them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn.engine.engine import Engine
from kvarn.errors import BackendError, ConstraintError, InvalidParameter
from kvarn.request import Request, RequestState
from kvarn.structured.compiler import CompiledConstraint, ConstraintCompiler
from kvarn.structured.constraints import Constraint, Regex
from kvarn.types import Completion, FinishReason, SamplingParams
from tests import submitting
from tests.unit.engine.fake import (
    EOS,
    VOCAB,
    completion_of,
    expected,
    is_idle,
    make_engine,
    run_to_end,
    saying,
    tokens_of,
)

NAME = "[A-Z][a-z]{3,9} [0-9]{2}"


class ByteWords:
    """The vocabulary of the fake engine: token i is the byte i, and 0 ends an answer."""

    vocab_size = VOCAB
    unused_ids: frozenset[int] = frozenset()
    eos_ids = (EOS,)
    bos_id = None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_control(self, token_id: int) -> bool:
        return token_id == EOS


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteWords(), VOCAB)


def submit(engine: Engine, prompt: str, constraint: Constraint | None, **params: Any) -> Request:
    compiled: CompiledConstraint | None = None if constraint is None else compiler().compile(constraint)
    settings = SamplingParams(constraint=constraint, **{"temperature": 0.0, "max_tokens": 60} | params)
    return submitting.submit(engine, tokens_of(prompt), settings, constraint=compiled)


def ask(engine: Engine, prompt: str, constraint: Constraint | None, **params: Any) -> Completion:
    request = submit(engine, prompt, constraint, **params)
    return completion_of(run_to_end(engine), request)


@pytest.mark.parametrize("pattern", [NAME, "(yes|no)", "x{5}", '\\{"a": (true|false)\\}'])
def test_an_answer_follows_its_pattern_and_stops_when_it_is_complete(pattern: str) -> None:
    completion = ask(make_engine(), "a prompt", Regex(pattern))
    assert re.fullmatch(pattern, completion.text)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_match is None


def test_no_step_is_spent_on_an_end_that_is_forced() -> None:
    engine = make_engine()
    completion = ask(engine, "p", Regex("abc"))
    assert completion.token_ids == tuple(b"abc")
    assert engine.stats().steps == 3


def test_where_the_answer_may_end_or_go_on_the_model_decides() -> None:
    assert ask(make_engine(saying("aaa", "p")), "p", Regex("a*")).token_ids == (*b"aaa", EOS)
    assert ask(make_engine(saying("aaa", "p")), "p", Regex("a*"), max_tokens=2).finish_reason is FinishReason.LENGTH


def test_an_empty_answer_is_an_answer() -> None:
    completion = ask(make_engine(), "p", Regex(""))
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.STOP


def test_an_answer_complete_at_its_last_allowed_token_is_complete() -> None:
    assert ask(make_engine(), "p", Regex("abc"), max_tokens=3).finish_reason is FinishReason.STOP
    assert ask(make_engine(), "p", Regex("abc"), max_tokens=2).finish_reason is FinishReason.LENGTH


def test_a_minimum_of_tokens_lasts_as_long_as_the_constraint_allows() -> None:
    silent = make_engine(lambda _: EOS)
    assert len(ask(silent, "p", Regex("a*"), min_tokens=5).text) == 5
    short = ask(silent, "p", Regex("ab?"), min_tokens=9)
    assert short.text == "ab"
    assert short.finish_reason is FinishReason.STOP


def test_stop_strings_still_end_an_answer() -> None:
    completion = ask(make_engine(), "p", Regex("abcdef"), stop="cd")
    assert completion.text == "ab"
    assert completion.stop_match == "cd"


def test_log_probabilities_are_of_what_the_model_said_before_the_constraint() -> None:
    completion = ask(make_engine(saying("xyz", "p")), "p", Regex("abc"), logprobs=1)
    assert completion.logprobs is not None
    first = completion.logprobs[0]
    assert first.top[0][0] == ord("x")
    assert first.logprob < first.top[0][1]


COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.9},
    {"temperature": 1.0, "typical_p": 0.2},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 200},
    {"temperature": 1.0, "repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"temperature": 0.8, "dry_multiplier": 5.0, "dry_allowed_length": 1, "penalty_window": 3},
    {"logit_bias": {ord("?"): 100.0, EOS: 100.0, ord("A"): -100.0}, "repetition_penalty": 100.0},
    {"temperature": 1e-39},
    {
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "dry_multiplier": 1.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.02,
        "logprobs": 5,
        "prompt_logprobs": 1,
        "min_tokens": 12,
    },
]


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_no_sampler_chooses_what_the_constraint_forbids(params: dict[str, Any]) -> None:
    engine = make_engine()
    leader = submit(engine, "prompt", Regex(NAME), seed=3, n=3, **params)
    others = [
        submitting.submit(
            engine, leader.prompt_ids, leader.params, choice=i, fork_of=leader, constraint=leader.constraint
        )
        for i in (1, 2)
    ]
    events = run_to_end(engine)
    for request in (leader, *others):
        assert re.fullmatch(NAME, completion_of(events, request).text)
    assert is_idle(engine)


def test_a_preempted_answer_is_the_same() -> None:
    patterns = [NAME, "[a-f]{20}", "(ab|cd){12}", "[0-9]+x"]
    alone = [ask(make_engine(), f"prompt {p}", Regex(p), temperature=1.0, seed=5) for p in patterns]
    engine = make_engine(num_blocks=16, context=60)
    # Twice as many as fit, also where patterns are compiled so slowly that some begin when others have ended.
    requests = [submit(engine, f"prompt {p}", Regex(p), temperature=1.0, seed=5, max_tokens=40) for p in patterns * 2]
    events = run_to_end(engine)
    assert engine.stats().preemptions > 0
    for request, wanted in zip(requests, alone * 2, strict=True):
        assert completion_of(events, request).text == wanted.text[:40]


def test_a_step_that_failed_and_was_repeated_changes_nothing() -> None:
    wanted = ask(make_engine(), "prompt", Regex(NAME))
    struck = make_engine(faults={2: RuntimeError("struck"), 6: RuntimeError("struck")})
    request = submit(struck, "prompt", Regex(NAME))
    assert completion_of(run_to_end(struck), request).text == wanted.text
    assert struck.stats().retried_steps == 2


def test_a_dead_end_fails_its_own_request_and_nobody_elses() -> None:
    engine = make_engine()
    neighbour = submitting.submit(engine, tokens_of("other"), SamplingParams(temperature=0.0, max_tokens=12))
    lost = submit(engine, "prompt", Regex("ab[\\x00]c"))  # the vocabulary has no token for NUL
    events = run_to_end(engine)
    assert lost.state is RequestState.FAILED
    assert isinstance(lost.error, ConstraintError)
    assert "dead end" in str(lost.error)
    assert list(completion_of(events, neighbour).token_ids) == expected(tokens_of("other"), 12)
    assert is_idle(engine)


def test_answers_with_and_without_constraints_share_a_step() -> None:
    engine = make_engine()
    free = submitting.submit(engine, tokens_of("free"), SamplingParams(temperature=0.0, max_tokens=12))
    bound = submit(engine, "bound", Regex(NAME))
    events = run_to_end(engine)
    assert list(completion_of(events, free).token_ids) == expected(tokens_of("free"), 12)
    assert re.fullmatch(NAME, completion_of(events, bound).text)


def test_a_constraint_nobody_compiled_is_refused_not_ignored() -> None:
    with pytest.raises(InvalidParameter, match="not compiled"):
        submitting.submit(make_engine(), tokens_of("p"), SamplingParams(constraint=Regex("a")))


def test_a_users_sampler_sees_what_is_allowed() -> None:
    kvarn.register_sampler("test-most-probable", lambda logits, token_ids, draw: int(np.argmax(logits)))
    assert re.fullmatch(NAME, ask(make_engine(), "p", Regex(NAME), sampler="test-most-probable", logprobs=0).text)


def test_a_users_sampler_that_ignores_the_constraint_fails_its_request() -> None:
    kvarn.register_sampler("test-stubborn", lambda logits, token_ids, draw: ord("?"))
    engine = make_engine()
    request = submit(engine, "p", Regex(NAME), sampler="test-stubborn")
    run_to_end(engine)
    assert isinstance(request.error, BackendError)
    assert "the constraint does not allow" in str(request.error)


def test_a_dead_end_under_a_users_sampler_is_a_dead_end() -> None:
    kvarn.register_sampler("test-most-probable", lambda logits, token_ids, draw: int(np.argmax(logits)))
    engine = make_engine()
    request = submit(engine, "p", Regex("ab[\\x00]c"), sampler="test-most-probable")
    run_to_end(engine)
    assert isinstance(request.error, ConstraintError)


def test_nothing_is_kept_of_an_answer_that_ended() -> None:
    engine = make_engine()
    request = submit(engine, "p", Regex(NAME))
    engine.step()
    assert request.sampling is not None
    run_to_end(engine)
    assert request.sampling is None
