"""The decoder over FakeBackend: rows of users' samplers beside rows of ours, DRY's breakers, broken logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import kvarn
from kvarn.backends.fake import FakeBackend
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.decoder import Commit, Span
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.sampling.custom_samplers import Draw, Float32
from kvarn.types import SamplingParams
from tests.submitting import new_request

VOCAB = 16
GREEDY = SamplingParams(temperature=0.0)
LOGITS = np.array([3.0, 2.0, *([0.0] * 14)], np.float32)


def decoder_of(encode: dict[str, list[int]] | None = None) -> AutoregressiveDecoder:
    read = None if encode is None else encode.__getitem__
    return AutoregressiveDecoder(FakeBackend(VOCAB), VOCAB, (0,), SamplingDefaults(), read)


def commits(*params: SamplingParams, logits: Float32 = LOGITS) -> list[Commit]:
    requests = [new_request(f"r{i}", (5, 6), p, max_total_tokens=99, seed=1) for i, p in enumerate(params)]
    spans = [Span(request, 1, [6], (0,)) for request in requests]
    return decoder_of().commit(spans, np.stack([logits] * len(spans)))


def sampler(name: str, token: object = 7) -> SamplingParams:
    def choose(logits: Float32, token_ids: Sequence[int], draw: Draw) -> int:
        if isinstance(token, Exception):
            raise token
        return token  # type: ignore[return-value]

    kvarn.register_sampler(name, choose)
    return SamplingParams(sampler=name)


def test_a_users_sampler_chooses_its_row_and_no_other() -> None:
    found = commits(GREEDY, sampler("test-row", 9), GREEDY)
    assert [commit.tokens[0].token_id for commit in found] == [0, 9, 0]
    assert [commit.num_computed for commit in found] == [1, 1, 1]


@pytest.mark.parametrize(
    ("token", "message"), [(ZeroDivisionError("oh"), "'test-bad' failed: oh"), (99, "not a token id"), (None, "None")]
)
def test_a_sampler_that_fails_ends_its_own_request_only(token: object, message: str) -> None:
    bad, good = commits(sampler("test-bad", token), GREEDY)
    assert bad.error is not None
    assert message in str(bad.error)
    assert bad.tokens == ()
    assert good.tokens[0].token_id == 0


def test_logits_that_are_not_numbers_never_reach_a_sampler() -> None:
    broken = LOGITS * np.float32("nan")
    for commit in commits(sampler("test-nan"), GREEDY, logits=broken):
        assert commit.error is not None
        assert "not numbers" in str(commit.error)


def test_a_users_choice_has_the_plain_log_probabilities() -> None:
    own = sampler("test-logprobs", 1).replace(logprobs=2, logit_bias={1: 5.0})
    plain, chosen = commits(SamplingParams(temperature=0.0, logprobs=2), own)
    first, second = plain.tokens[0].logprob, chosen.tokens[0].logprob
    assert first is not None
    assert second is not None
    assert second.top == first.top
    assert second.logprob == first.top[1][1]


def test_prompt_chunks_commit_no_token_beside_a_users_sampler() -> None:
    params = sampler("test-chunk", 3)
    chunk = new_request("chunk", tuple(range(9)), GREEDY, max_total_tokens=99, seed=1)
    own = new_request("own", (5, 6), params, max_total_tokens=99, seed=1)
    found = decoder_of().commit([Span(chunk, 0, [0, 1], ()), Span(own, 1, [6], (0,))], LOGITS[None])
    assert [len(commit.tokens) for commit in found] == [0, 1]
    assert [commit.num_computed for commit in found] == [2, 1]


def test_dry_breakers_are_read_at_the_start_of_a_text_and_behind_a_word() -> None:
    encode = {"a": [1], ":": [2], "a:": [1, 3], "\n": [4], "a\n": [1, 4], "*": [5], "a*": [6]}
    params = SamplingParams(
        temperature=0.0, dry_multiplier=50.0, dry_allowed_length=1, dry_sequence_breakers=(":", "\n", "*")
    )
    decoder = decoder_of(encode)
    for breaker, is_broken in [(2, True), (3, True), (4, True), (5, True), (6, False), (9, False)]:
        # 9 0 .. 9: token 0 would repeat what came after 9, unless a breaker stands at the end.
        prompt = (breaker, 0, 8, breaker)
        request = new_request(f"r{breaker}", prompt, params, max_total_tokens=99, seed=1)
        (commit,) = decoder.commit([Span(request, 3, [breaker], (0,))], LOGITS[None])
        assert commit.tokens[0].token_id == (0 if is_broken else 1)
