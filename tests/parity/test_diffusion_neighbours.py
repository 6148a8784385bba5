"""Diffusion beside autoregressive requests of another model in one process, and guidance where memory is short."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvarn import LLM, DiffusionParams, KvarnError, SamplingParams
from tests.chat_model import write_chat_model
from tests.diffusing import DiffusionModel, answer, denoise, write_talking_model

PROMPTS = ["a mill", "grinds", "grain all day", "and the miller sleeps"]
FILL = SamplingParams(
    max_tokens=24, temperature=1.0, seed=5, ignore_eos=True, diffusion=DiffusionParams(block_length=8)
)
WRITE = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)


def test_two_kinds_of_models_at_once_change_no_token_of_each_other(tmp_path: Path) -> None:
    denoiser, writer = write_talking_model(tmp_path / "d.gguf"), write_chat_model(tmp_path / "w.gguf")
    with LLM(str(denoiser), context=128) as fills, LLM(str(writer), context=128) as writes:
        work = [(llm, prompt, params) for prompt in PROMPTS for llm, params in ((fills, FILL), (writes, WRITE))]
        alone = [llm.generate(prompt, params).token_ids for llm, prompt, params in work]
        with ThreadPoolExecutor(len(work)) as pool:
            together = list(pool.map(lambda item: item[0].generate(item[1], item[2]).token_ids, work))
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_guidance_that_does_not_fit_is_refused_and_without_it_there_is_an_answer(tmp_path: Path) -> None:
    model, prompt = DiffusionModel("llada", tmp_path), list(range(6, 30))
    engine = model.engine(num_blocks=4)
    assert len(answer(engine, prompt, denoise(32, block_length=8))) == 32
    with pytest.raises(KvarnError, match=r"cache|memory|tokens"):
        answer(engine, prompt, denoise(32, block_length=8, cfg_scale=1.0))
    assert len(answer(engine, prompt, denoise(32, block_length=8))) == 32  # nothing was left behind
