"""Ids without a token are never chosen and never accepted, however large their logits are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn import LLM, DiffusionParams, SamplingParams
from kvarn.backends.unused_ids import NO_UNUSED_IDS
from kvarn.models.spec import Autoregressive
from kvarn.structured.constraints import Grammar, Regex
from tests.chat_model import write_chat_model
from tests.padded_models import END, MASK, ROWS, UNUSED, padded_model

NUM_TOKENS = 24
HOLE, PADDING = 256, ROWS - 1
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with scores": {"temperature": 0.0, "logprobs": 5},
    "sampled": {"temperature": 1.0},
    "hot": {"temperature": 100.0, "top_p": 1.0},
    "nearly cold": {"temperature": 1e-5},
    "the best": {"temperature": 1.0, "top_k": 1},
    "the first few": {"temperature": 1.0, "top_k": 200, "top_p": 0.5},
    "not the best": {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01, "top_p": 1.0},
    "typical": {"temperature": 1.0, "typical_p": 0.3},
    "likely": {"temperature": 1.0, "min_p": 0.5},
}
PENALTIES: dict[str, dict[str, Any]] = {
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "without repeats": {"temperature": 0.0, "dry_multiplier": 2.0},
    "by a function": {"sampler": "largest"},
    "constrained": {"temperature": 1.0, "constraint": Regex("[a-z ]{40}")},
}


def largest(logits: np.ndarray, _: Any, __: Any) -> int:
    return int(np.argmax(logits))


def stubborn(_: Any, __: Any, ___: Any) -> int:
    return PADDING


@pytest.fixture(scope="module", autouse=True)
def samplers() -> None:
    kvarn.register_sampler("largest", largest)
    kvarn.register_sampler("stubborn", stubborn)


@pytest.fixture(scope="module", params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["llama", "dream", "sdar"])
def llm(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = padded_model(request.param, tmp_path_factory.mktemp("padded"))
    with LLM(str(folder), backend=backend, threads=1, context=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def writer(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = padded_model("llama", tmp_path_factory.mktemp("padded"))
    with LLM(str(folder), backend=backend, threads=1, context=128) as llm:
        yield llm


def is_writer(llm: LLM) -> bool:
    return isinstance(llm.spec.generation, Autoregressive)


def params_of(llm: LLM, choice: dict[str, Any]) -> SamplingParams:
    diffusion = None if is_writer(llm) else DiffusionParams(policy="threshold", threshold=0.1)
    ends = {"ignore_eos": "constraint" not in choice}
    return SamplingParams(max_tokens=NUM_TOKENS, seed=5, diffusion=diffusion, **ends, **choice)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_no_way_of_choosing_takes_an_id_without_a_token(llm: LLM, choice: dict[str, Any]) -> None:
    completion = llm.generate("hello", params_of(llm, choice))
    assert len(completion.token_ids) == NUM_TOKENS
    assert not UNUSED & set(completion.token_ids)
    assert is_writer(llm) or MASK not in completion.token_ids


@pytest.mark.parametrize("choice", PENALTIES.values(), ids=PENALTIES.keys())
def test_nor_do_penalties_functions_and_constraints(writer: LLM, choice: dict[str, Any]) -> None:
    completion = writer.generate("hello", params_of(writer, choice))
    assert len(completion.token_ids) == NUM_TOKENS
    assert not UNUSED & set(completion.token_ids)


def test_the_models_would_choose_them_if_they_could(llm: LLM) -> None:
    """Else the tests above would show nothing."""
    decoder: Any = llm.admission.decoder
    known, decoder.unused = decoder.unused, NO_UNUSED_IDS
    try:
        completion = llm.generate("hello", params_of(llm, {"temperature": 0.0}))
    finally:
        decoder.unused = known
    assert len(UNUSED & set(completion.token_ids)) > 0


def test_the_greedy_choice_is_the_largest_of_the_other_logits(writer: LLM) -> None:
    greedy = writer.generate("hello", params_of(writer, {"temperature": 0.0})).token_ids
    assert greedy == writer.generate("hello", params_of(writer, {"sampler": "largest"})).token_ids


def test_a_function_that_returns_one_all_the_same_fails_alone(writer: LLM) -> None:
    other = writer.submit("hello", params_of(writer, {"temperature": 0.0}))
    with pytest.raises(kvarn.KvarnError, match=f"returned the id {PADDING}, which no token has"):
        writer.generate("hello", params_of(writer, {"sampler": "stubborn"}))
    assert len(other.result(60).token_ids) == NUM_TOKENS


def test_the_scores_beside_a_choice_name_them_and_their_text_can_be_read(writer: LLM) -> None:
    completion = writer.generate("hello", params_of(writer, {"temperature": 0.0, "logprobs": 5}))
    assert completion.logprobs is not None
    named = {token_id for score in completion.logprobs for token_id, _ in score.top}
    assert named & UNUSED  # log-probabilities are of the plain softmax
    assert all(isinstance(writer.tokenizer.token_bytes(token_id), bytes) for token_id in named)
    assert writer.tokenizer.decode(sorted(UNUSED)) == ""


@pytest.mark.parametrize("token_id", [HOLE, PADDING])
@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids"])
def test_callers_may_not_name_them(llm: LLM, field: str, token_id: int) -> None:
    named: dict[str, Any] = {"logit_bias": {token_id: 100.0}} if field == "logit_bias" else {}
    named = {"stop_token_ids": (token_id,)} if field == "stop_token_ids" else named
    prompt = [104, token_id] if field == "prompt" else "hello"
    with pytest.raises(kvarn.InvalidParameter, match=f"token id {token_id} in .* stands for no token: 62 of") as raised:
        llm.generate(prompt, params_of(llm, named))
    assert raised.value.field == field


def test_nor_pin_them_to_a_canvas(llm: LLM) -> None:
    if is_writer(llm):
        pytest.skip("only a canvas has pins")
    pinned = SamplingParams(max_tokens=8, diffusion=DiffusionParams(pinned={2: PADDING}))
    with pytest.raises(kvarn.InvalidParameter, match=f"token id {PADDING} in pinned stands for no token"):
        llm.generate("hello", pinned)
    allowed = SamplingParams(max_tokens=8, ignore_eos=True, diffusion=DiffusionParams(pinned={2: END}))
    assert llm.generate("hello", allowed).token_ids[2] == END


def test_a_grammar_cannot_force_one(writer: LLM) -> None:
    with pytest.raises(kvarn.ConstraintError):
        writer.generate("hello", params_of(writer, {"constraint": Grammar(f"start: <[{PADDING}]>")}))


def test_unused_tokens_of_a_gguf_file_are_such_ids(tmp_path: Path, backend: str) -> None:
    types = [1] * 192 + [5] * 64 + [3] * 4
    path = write_chat_model(tmp_path / "tiny.gguf", **{"tokenizer.ggml.token_type": types})
    with LLM(str(path), backend=backend, threads=1, context=400) as llm:
        hot = SamplingParams(max_tokens=300, ignore_eos=True, seed=3, temperature=100.0, top_p=1.0)
        chosen = set(llm.generate("A", hot).token_ids)
        assert len(chosen) > 100
        assert not chosen & set(range(192, 256))
        with pytest.raises(kvarn.InvalidParameter, match="token id 200 in logit_bias stands for no token"):
            llm.generate("A", SamplingParams(max_tokens=1, logit_bias={200: 1.0}))


def test_a_model_without_such_ids_does_nothing_about_them(tmp_path: Path, backend: str) -> None:
    with LLM(str(write_chat_model(tmp_path / "tiny.gguf")), backend=backend, threads=1) as llm:
        assert llm.admission.decoder.unused.mask is None
