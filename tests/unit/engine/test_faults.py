"""Backends that fail: only the requests at fault end, the others' bytes stay, and every block comes back."""

from __future__ import annotations

import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.backends.fake import Fault
from kvarn.errors import BackendError
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import complete, completion_of, expected, is_idle, make_engine, run_to_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPTS = [list(range(1, 40)), [7], [3, 1, 4, 1, 5, 9, 2, 6]]
BAD = 251  # none of the answers below has it


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError()], ids=["exception", "allocation"])
@pytest.mark.parametrize("step", range(50))
def test_a_step_that_fails_once_changes_no_answer(step: int, error: Exception) -> None:
    engine = make_engine(faults={step: error})
    params = GREEDY.replace(max_tokens=60, ignore_eos=True)
    requests = [submit(engine, prompt, params) for prompt in PROMPTS]
    events = run_to_end(engine)
    answers = [list(completion_of(events, request).token_ids) for request in requests]
    alone = [list(complete(make_engine(), prompt, params).token_ids) for prompt in PROMPTS]
    assert answers == alone
    assert engine.stats().retried_steps == 1
    assert is_idle(engine)


@pytest.mark.parametrize("fault", [RuntimeError("boom"), MemoryError("no memory"), "nan"], ids=str)
def test_a_request_that_fails_again_alone_is_the_only_one_that_fails(fault: Fault) -> None:
    engine = make_engine(poison={BAD: fault})
    requests = [submit(engine, prompt, GREEDY) for prompt in PROMPTS]
    bad = submit(engine, [1, 2, BAD, 4], GREEDY)
    events = run_to_end(engine)
    assert completion_of(events, bad).finish_reason is FinishReason.FAILED
    assert isinstance(bad.error, BackendError)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert list(completion_of(events, request).token_ids) == expected(prompt, 20)
    assert is_idle(engine)
    assert list(complete(engine, PROMPTS[0], GREEDY).token_ids) == expected(PROMPTS[0], 20)


def test_the_error_names_the_backend_and_keeps_its_cause() -> None:
    engine = make_engine(poison={BAD: RuntimeError("boom")})
    request = submit(engine, [BAD], GREEDY)
    run_to_end(engine)
    assert "fake backend failed: boom" in str(request.error)
    assert request.error is not None
    assert isinstance(request.error.__cause__, RuntimeError)


@pytest.mark.parametrize("step", range(8))
def test_logits_that_are_no_numbers_fail_the_requests_that_have_them(step: int) -> None:
    engine = make_engine(faults={step: "nan"})
    request = submit(engine, PROMPTS[0], GREEDY)
    has_row = step >= 2  # earlier steps compute chunks of the prompt, whose logits nobody wants
    reason = completion_of(run_to_end(engine), request).finish_reason
    assert (reason is FinishReason.FAILED) == has_row
    assert is_idle(engine)
    assert list(complete(engine, PROMPTS[0], GREEDY).token_ids) == expected(PROMPTS[0], 20)


def test_copies_that_fail_are_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    params = GREEDY.replace(n=2, ignore_eos=True)
    first = submit(engine, PROMPTS[0], params)
    second = submit(engine, PROMPTS[0], params, choice=1, fork_of=first)

    def copy_blocks(copies: list[BlockCopy]) -> None:
        raise RuntimeError("no copies today")

    monkeypatch.setattr(engine.backend, "copy_blocks", copy_blocks)
    events = run_to_end(engine)
    assert completion_of(events, first).token_ids == completion_of(events, second).token_ids
    assert second.num_preemptions == 1
    assert is_idle(engine)


def test_a_leader_that_fails_leaves_its_followers_to_themselves() -> None:
    engine = make_engine(faults={2: "nan"})
    params = GREEDY.replace(n=3)
    first = submit(engine, PROMPTS[0], params)
    others = [submit(engine, PROMPTS[0], params, choice=i, fork_of=first) for i in (1, 2)]
    events = run_to_end(engine)
    assert completion_of(events, first).finish_reason is FinishReason.FAILED
    for other in others:
        assert list(completion_of(events, other).token_ids) == expected(PROMPTS[0], 20)
    assert is_idle(engine)
