"""kvarn.LLM on a tiny diffusion model with the reference backend: what it says, and what it refuses by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvarn
from kvarn import LLM, DiffusionParams, SamplingParams, SparseConfig
from tests.chat_model import write_chat_model
from tests.diffusing import write_talking_model

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True, diffusion=DiffusionParams(block_length=4))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_talking_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(str(path), backend="reference", context=100) as llm:
        yield llm


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(str(path), backend="reference", context=100) as llm:
        yield llm


def test_it_generates_streams_and_chats(llm: LLM) -> None:
    completion = llm.generate("hello", EIGHT)
    assert len(completion.token_ids) == 8
    assert completion.usage.completion_tokens == 8
    assert "".join(event.text for event in llm.stream("hello", EIGHT)) == completion.text
    assert len(llm.chat([{"role": "user", "content": "hi"}], EIGHT).token_ids) == 8


def test_it_is_greedy_unless_asked(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=6)
    assert llm.generate("hello", plain).token_ids == llm.generate("hello", plain).token_ids
    warm = [llm.generate("hello", plain.replace(temperature=2.0, seed=seed)).token_ids for seed in (1, 2, 1)]
    assert warm[0] == warm[2] != warm[1]


def test_without_max_tokens_what_will_be_computed_is_admitted_not_the_whole_context(tmp_path: Path) -> None:
    with LLM(str(write_talking_model(tmp_path / "tiny.gguf")), backend="reference", context=1000) as llm:
        admitted = llm.admission.admit(llm.submissions.of_prompt("hello", SamplingParams())).admitted
        grown = llm.submissions.of_prompt("hello", SamplingParams(diffusion=DiffusionParams(canvas="grow")))
        assert admitted is not None
        assert admitted.max_tokens == 256
        assert admitted.max_total_tokens == len(admitted.prompt_ids) + 256
        assert llm.admission.admit(grown).admitted.max_tokens == 1000 - len(admitted.prompt_ids)  # type: ignore[union-attr]


def test_several_answers_are_denoised_each_on_its_own(llm: LLM) -> None:
    params = EIGHT.replace(temperature=2.0, n=3, seed=4)
    completion = llm.generate("hello", params)
    answers = {completion.token_ids, *(other.token_ids for other in completion.alternatives)}
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("dry_multiplier", 0.8),
        ("prompt_logprobs", 1),
        ("prefill_only", True),
        ("constraint", kvarn.Regex("a+")),
    ],
)
def test_what_needs_one_token_after_the_other_is_refused_by_name(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(kvarn.InvalidParameter, match=name):
        llm.generate("hello", EIGHT.replace(**{name: value}))


def test_scores_are_refused(llm: LLM) -> None:
    with pytest.raises(kvarn.UnsupportedModel, match="score"):
        llm.score([1, 2, 3])


def test_diffusion_options_are_refused_by_a_model_that_writes(writer: LLM) -> None:
    with pytest.raises(kvarn.InvalidParameter, match="diffusion"):
        writer.generate("hello", EIGHT)


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "block"},
        {"cache": "sub_block", "block_length": 12},
        {"sub_block_length": 5},
        {"sub_block_length": 64},
        {"sub_block_length": 8, "policy": "joint_threshold"},
        {"pinned": {8: 1}},
        {"pinned": {0: 100_000}},
        {"pinned": dict.fromkeys(range(8), 1)},
    ],
)
def test_what_the_model_cannot_do_is_refused(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(kvarn.InvalidParameter):
        llm.generate("hello", EIGHT.replace(diffusion=DiffusionParams(**options)))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "threshold", "threshold": 1.5},
        {"policy": "threshold", "threshold": -0.1},
        {"threshold": 0.9},
        {"radius": 4},
        {"policy": "joint_threshold", "max_post_edit_steps": 10**6},
        {"steps": 0},
        {"block_length": 0},
        {"sub_block_length": 0},
        {"policy": "best"},
        {"cache": "all"},
        {"cache": "dual", "sparse": SparseConfig()},
        {"cache": "sparse", "sparse": SparseConfig(enabled=False)},
        {"alg_temp": 0.5, "policy": "threshold"},
        {"cfg_scale": -1.0},
        {"pinned": {"a": 1}},
    ],
)
def test_bad_options_are_refused_when_made(options: dict[str, Any]) -> None:
    with pytest.raises(kvarn.InvalidParameter):
        DiffusionParams(**options)


@pytest.mark.parametrize("options", [{"retention_ratio": 0}, {"retention_ratio": 1.1}, {"pool_kernel": 2}])
def test_bad_sparse_options_are_refused_when_made(options: dict[str, Any]) -> None:
    with pytest.raises(kvarn.InvalidParameter):
        SparseConfig(**options)


def test_a_pinned_token_stands_in_the_answer(llm: LLM) -> None:
    params = EIGHT.replace(diffusion=DiffusionParams(block_length=4, pinned={2: 65, 4: 66, 5: 67, 6: 68, 7: 69}))
    token_ids = llm.generate("hello", params).token_ids
    assert token_ids[2] == 65
    assert token_ids[4:] == (66, 67, 68, 69)


def test_a_canvas_may_fill_the_whole_context(llm: LLM) -> None:
    prompt = list(range(70))
    assert len(llm.generate(prompt, SamplingParams(ignore_eos=True)).token_ids) == 30
    assert len(llm.generate(prompt, SamplingParams(max_tokens=1)).token_ids) == 1


def test_the_asynchronous_face_says_the_same(llm: LLM, tmp_path: Path) -> None:
    path = write_talking_model(tmp_path / "tiny.gguf")

    async def ask() -> tuple[int, ...]:
        async with kvarn.AsyncLLM(str(path), backend="reference", context=100) as model:
            return (await model.generate("hello", EIGHT)).token_ids

    assert asyncio.run(ask()) == llm.generate("hello", EIGHT).token_ids


def test_the_canvas_is_told_after_each_step_when_asked_for(llm: LLM) -> None:
    params = EIGHT.replace(diffusion=DiffusionParams(block_length=4, steps=4, events=True))
    views = [event.canvas for event in llm.stream("hello", params) if event.canvas is not None]
    assert [view.token_ids.count(None) for view in views] == [6, 4, 2, 0]
    assert all(isinstance(view, kvarn.CanvasView) for view in views)


def test_speed_counts_the_answer_and_all_the_time_it_took(llm: LLM) -> None:
    completion = llm.generate("hello", EIGHT)
    timings = completion.timings
    assert timings.num_first == 4
    assert timings.tokens_per_s(8) == pytest.approx(8 / (timings.prefill_s + timings.decode_s))
