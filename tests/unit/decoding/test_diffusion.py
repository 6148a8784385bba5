"""Denoising on tiny random models with the reference backend: canvases, caches, ends, what changes no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.batch import Batch
from kvarn.engine.engine import Engine
from kvarn.types import FinishReason
from tests.diffusing import DiffusionModel, answer, denoise, run
from tests.diffusion_models import MASK_ID

PROMPT = [7, 31, 12, 90, 44, 8, 101]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llada(folder: Path) -> DiffusionModel:
    return DiffusionModel("llada", folder)


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
    from kvarn.diffusion import SparseConfig

    for model in (llada, dream):
        dual = answer(model.engine(), PROMPT, denoise(16, block_length=8, cache="dual"))
        sparse = SparseConfig(retention_ratio=1.0, delay_step=0)
        assert answer(model.engine(), PROMPT, denoise(16, block_length=8, sparse=sparse)) == dual


def test_block_diffusion_gives_the_same_with_and_without_its_cache(sdar: DiffusionModel) -> None:
    for num_prompt in range(1, 8):
        cached = answer(sdar.engine(), PROMPT[:num_prompt], denoise(11))
        assert cached == answer(sdar.engine(), PROMPT[:num_prompt], denoise(11, cache="none"))
        assert len(cached) == 11


def test_tokens_come_at_the_end_of_their_block_and_stay(llada: DiffusionModel) -> None:
    engine, events = llada.engine(), []
    completion = run(engine, [engine.submit(PROMPT, denoise(10, block_length=4, events=True))], events)[0]
    told = [event.token_id for event in events if event.canvas is None]
    assert tuple(told) == completion.token_ids
    assert len(told) == 10
    views = [event.canvas for event in events if event.canvas is not None]
    assert [view.step for view in views] == list(range(1, 13))
    assert [sum(token is None for token in view.token_ids) for view in views] == list(range(11, -1, -1))
    assert views[-1].token_ids[:10] == completion.token_ids


def test_an_end_token_ends_the_answer_at_its_block(llada: DiffusionModel) -> None:
    full = answer(llada.engine(), PROMPT, denoise(16, block_length=4))
    eos = full[5]
    engine = llada.engine(eos_ids=(eos,))
    params = denoise(16, block_length=4, sampling={"ignore_eos": False})
    completion = run(engine, [engine.submit(PROMPT, params)])[0]
    assert completion.token_ids == full[: full.index(eos) + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_match == eos
