"""Denoising on tiny random models with the reference backend: canvases, caches, ends, what changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import Batch
from kvarn.diffusion import SparseConfig
from kvarn.engine.engine import Engine
from kvarn.errors import InvalidParameter
from kvarn.types import FinishReason
from tests.diffusing import DiffusionModel, answer, denoise, run
from tests.diffusion_models import MASK_ID
from tests.submitting import submit

PROMPT = [7, 31, 12, 90, 44, 8, 101]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llada(folder: Path) -> DiffusionModel:
    return DiffusionModel("llada-tied", folder)


@pytest.fixture(scope="module")
def dream(folder: Path) -> DiffusionModel:
    return DiffusionModel("dream", folder)


@pytest.fixture(scope="module")
def sdar(folder: Path) -> DiffusionModel:
    return DiffusionModel("sdar", folder)


def logits_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    """All logits of a canvas, computed in one pass without any cache."""
    num = len(tokens)
    batch = Batch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(num, dtype=np.int32),
        row_starts=np.array([0, num], np.int32),
        context_lens=np.array([num], np.int32),
        block_tables=np.empty((1, 0), np.int32),
        output_rows=np.arange(num, dtype=np.int32),
    )
    return engine.backend.logits(engine.backend.forward(batch))


def low_confidence(engine: Engine, prompt: list[int], num_tokens: int, block: int, per_step: int) -> list[int]:
    """The published loop, with a number of tokens per step."""
    tokens = prompt + [MASK_ID] * num_tokens
    masked = np.array([False] * len(prompt) + [True] * num_tokens)
    for start in range(len(prompt), len(tokens), block):
        while masked[start : start + block].any():
            logits = logits_of(engine, tokens).astype(np.float64)
            probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
            probabilities /= probabilities.sum(axis=1, keepdims=True)
            logits[:, MASK_ID] = -np.inf
            best = logits.argmax(axis=1)
            confidence = np.where(masked, probabilities[np.arange(len(tokens)), best], -np.inf)
            confidence[start + block :] = -np.inf
            for position in np.argsort(-confidence, kind="stable")[:per_step]:
                tokens[position], masked[position] = int(best[position]), False
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("steps", "per_step"), [(None, 1), (12, 1), (6, 2), (3, 4)])
def test_without_a_cache_the_published_loop_is_followed(
    llada: DiffusionModel, steps: int | None, per_step: int
) -> None:
    engine = llada.engine()
    found = answer(engine, PROMPT, denoise(12, steps=steps, block_length=4, cache="none"))
    assert list(found) == low_confidence(engine, PROMPT, 12, 4, per_step)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "sparse"])
def test_with_one_step_per_block_every_cache_gives_the_same(llada: DiffusionModel, cache: str) -> None:
    engine = llada.engine()
    found = answer(engine, PROMPT, denoise(12, steps=3, block_length=4, cache=cache))
    assert list(found) == low_confidence(engine, PROMPT, 12, 4, 4)


def test_sparse_with_everything_kept_is_dual(llada: DiffusionModel, dream: DiffusionModel) -> None:
    for model, cfg_scale in ((llada, 0.0), (llada, 0.7), (dream, 0.0), (dream, 0.7)):
        dual = answer(model.engine(), PROMPT, denoise(16, block_length=8, cache="dual", cfg_scale=cfg_scale))
        sparse = SparseConfig(retention_ratio=1.0, delay_step=0)
        assert answer(model.engine(), PROMPT, denoise(16, block_length=8, sparse=sparse, cfg_scale=cfg_scale)) == dual


def test_block_diffusion_gives_the_same_with_and_without_its_cache(sdar: DiffusionModel) -> None:
    for num_prompt in range(1, 8):
        cached = answer(sdar.engine(), PROMPT[:num_prompt], denoise(11))
        assert cached == answer(sdar.engine(), PROMPT[:num_prompt], denoise(11, cache="none"))
        assert len(cached) == 11


def test_tokens_come_at_the_end_of_their_block_and_stay(llada: DiffusionModel) -> None:
    engine, events = llada.engine(), []
    completion = run(engine, [submit(engine, PROMPT, denoise(12, block_length=4, events=True))], events)[0]
    streamed = [event.token_id for event in events if event.canvas is None]
    assert tuple(streamed) == completion.token_ids
    assert len(streamed) == 12
    views = [event.canvas for event in events if event.canvas is not None]
    assert [view.step for view in views] == list(range(1, 13))
    assert [sum(token is None for token in view.token_ids) for view in views] == list(range(11, -1, -1))
    assert views[-1].token_ids == completion.token_ids


def test_nobody_waits_for_positions_behind_the_end(llada: DiffusionModel) -> None:
    full = answer(llada.engine(), PROMPT, denoise(16, block_length=16))
    for eos, max_tokens in ((full[3], 16), (full[0], 16), (None, 5), (None, 1)):
        engine = llada.engine(eos_ids=() if eos is None else (eos,))
        params = denoise(max_tokens, block_length=16, sampling={"ignore_eos": False})
        found = answer(engine, PROMPT, params)
        assert found == full[: max_tokens if eos is None else full.index(eos) + 1]
        assert engine.stats().steps <= 16
    assert engine.stats().steps < 16


def test_an_end_token_ends_the_answer_at_its_block(llada: DiffusionModel) -> None:
    full = answer(llada.engine(), PROMPT, denoise(16, block_length=4))
    eos = full[5]
    engine = llada.engine(eos_ids=(eos,))
    params = denoise(16, block_length=4, sampling={"ignore_eos": False})
    completion = run(engine, [submit(engine, PROMPT, params)])[0]
    assert completion.token_ids == full[: full.index(eos) + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_match == eos


def test_a_mask_token_in_the_prompt_is_text_like_any_other(llada: DiffusionModel) -> None:
    prompt = [7, MASK_ID, 12, MASK_ID, 44]
    engine = llada.engine()
    found = answer(engine, prompt, denoise(8, block_length=4, cache="none"))
    assert list(found) == low_confidence(engine, prompt, 8, 4, 1)
    assert MASK_ID not in found


def test_confidence_is_clean_whatever_the_temperature(llada: DiffusionModel) -> None:
    engine = llada.engine()
    cold = run(engine, [submit(engine, PROMPT, denoise(4, block_length=4, sampling={"logprobs": 0}))])[0]
    assert cold.logprobs is not None
    warm_params = denoise(4, block_length=4, steps=1, sampling={"logprobs": 20, "temperature": 3.0, "seed": 5})
    warm = run(engine, [submit(engine, PROMPT, warm_params)])[0]
    logits = logits_of(engine, PROMPT + [MASK_ID] * 4)[len(PROMPT) :].astype(np.float64)
    plain = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    for row, entry in zip(plain, warm.logprobs or (), strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert entry.entropy == pytest.approx(-(np.exp(row) * row).sum(), abs=1e-4)


def test_guidance_changes_the_answer_and_follows_its_formula(llada: DiffusionModel) -> None:
    engine = llada.engine()
    found = answer(engine, PROMPT, denoise(4, block_length=4, steps=1, cache="none", cfg_scale=2.0))
    masked = logits_of(engine, [MASK_ID] * (len(PROMPT) + 4))[len(PROMPT) :]
    logits = logits_of(engine, PROMPT + [MASK_ID] * 4)[len(PROMPT) :]
    guided = masked + 3.0 * (logits - masked)
    guided[:, MASK_ID] = -np.inf
    assert list(found) == guided.argmax(axis=1).tolist()
    assert found != answer(engine, PROMPT, denoise(4, block_length=4, steps=1, cache="none"))


def test_shifted_logits_are_read_one_row_before(dream: DiffusionModel) -> None:
    engine = dream.engine()
    found = answer(engine, PROMPT, denoise(4, block_length=4, steps=1, cache="none"))
    logits = logits_of(engine, PROMPT + [MASK_ID] * 4)[len(PROMPT) - 1 : -1]
    logits[:, MASK_ID] = -np.inf
    assert list(found) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_an_answer_has_exactly_the_tokens_asked_for(
    llada: DiffusionModel, dream: DiffusionModel, sdar: DiffusionModel, max_tokens: int
) -> None:
    for model in (llada, dream, sdar):
        ways = ({}, {"steps": 100}, {"steps": 1}, {"policy": "entropy", "steps": 100}, {"canvas": "grow"})
        for options in (*ways, {"policy": "joint_threshold"}):
            found = answer(model.engine(is_native=True), PROMPT[:1], denoise(max_tokens, **options))
            assert len(found) == max_tokens


@pytest.mark.parametrize("policy", ["entropy", "low_confidence", "threshold"])
def test_any_number_of_steps_ends_soon(llada: DiffusionModel, policy: str) -> None:
    engine = llada.engine()
    assert len(answer(engine, PROMPT, denoise(8, block_length=4, steps=2**31 - 1, policy=policy))) == 8
    assert engine.stats().steps <= 8


def test_a_full_block_is_edited_until_nothing_changes_or_its_passes_are_used_up(llada: DiffusionModel) -> None:
    passes = {}
    for limit in (0, 1, 16):
        engine = llada.engine()
        joint = {"policy": "joint_threshold", "threshold": 0.0, "max_post_edit_steps": limit}
        assert len(answer(engine, PROMPT, denoise(4, block_length=4, **joint))) == 4
        passes[limit] = engine.stats().steps
    assert passes[0] == 1  # everything at once, and no more
    assert passes[1] == 2
    assert 2 <= passes[16] <= 17


def test_more_steps_than_tokens_are_as_good_as_one_for_each(llada: DiffusionModel) -> None:
    expected = answer(llada.engine(), PROMPT, denoise(8, block_length=4))
    assert answer(llada.engine(), PROMPT, denoise(8, block_length=4, steps=100)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "dual"},
        {"cache": "prefix"},
        {"sparse": SparseConfig()},
        {"block_length": 8},
        {"cfg_scale": 1.0},
        {"canvas": "fixed"},
    ],
)
def test_block_diffusion_refuses_what_it_has_no_use_for(sdar: DiffusionModel, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        submit(sdar.engine(), PROMPT, denoise(8, **options))
