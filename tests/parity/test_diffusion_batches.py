"""An answer does not depend on neighbours, the budget of a step or preemption: every policy, cache and guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvarn import SamplingParams, TokenLogprob
from kvarn.diffusion import POLICIES, SparseConfig
from kvarn.engine.engine import Engine
from kvarn.formats.weights import TensorType
from kvarn.request import Request
from tests.diffusing import DiffusionModel, denoise, run
from tests.diffusion_models import BLOCKS
from tests.submitting import submit
from tests.tiny_models import VOCAB

SPARSE = SparseConfig(retention_ratio=0.5, delay_step=1)
WAYS: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "sub_block": {"cache": "sub_block", "sub_block_length": 2},
    "sparse": {"sparse": SPARSE},
    "grow": {"cache": "dual", "canvas": "grow"},
    "guided": {"cache": "dual", "cfg_scale": 0.8},
    "guided-sparse": {"sparse": SPARSE, "cfg_scale": 0.8},
}
SAMPLED = {"temperature": 1.2, "seed": 11, "ignore_eos": True, "logprobs": 2}
Answer = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]  # bit by bit the same


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionModel]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: DiffusionModel(arch, folder, TensorType.Q4_0) for arch in ("llada-tied", "dream", *BLOCKS)}


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(2, 30)).tolist() for _ in range(count)]


def answers(requests: Sequence[Request]) -> list[Answer]:
    return [(request.output_ids, tuple(request.logprobs)) for request in requests]


def alone(model: DiffusionModel, params: SamplingParams) -> list[Answer]:
    """The answers of an engine that had one thing to do at a time."""
    engine, requests = model.engine(is_native=True), []
    for prompt in prompts(4):
        requests.append(submit(engine, prompt, params))
        run(engine, requests[-1:])
    return answers(requests)


def together(engine: Engine, params: SamplingParams, preempted_in: Sequence[int] = ()) -> list[Answer]:
    """Answers to all prompts at once; after some steps somebody loses its blocks."""
    requests = [submit(engine, prompt, params) for prompt in prompts(4)]
    for step in range(1, max(preempted_in, default=0) + 1):
        engine.step()
        engine.kv.check()
        running = [request for request in requests if request.state == "running"]
        if step in preempted_in and running:
            engine.scheduler.preempt(running[step % len(running)])
    run(engine, [])
    return answers(requests)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["llada-tied", "dream"])
def test_every_cache_alone_together_and_preempted(models: dict[str, DiffusionModel], arch: str, way: str) -> None:
    params = denoise(12, block_length=4, policy="threshold", threshold=0.05, sampling=SAMPLED, **WAYS[way])
    expected = alone(models[arch], params)
    assert len({token_ids for token_ids, _ in expected}) == 4
    assert together(models[arch].engine(is_native=True), params) == expected
    assert together(models[arch].engine(is_native=True, max_batch_tokens=20), params) == expected
    assert (
        together(models[arch].engine(is_native=True, max_batch_tokens=50), params, preempted_in=(2, 5, 6, 11, 17, 26))
        == expected
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arch", ["llada-tied", "dream", "sdar"])
def test_every_policy_alone_together_and_preempted(models: dict[str, DiffusionModel], arch: str, policy: str) -> None:
    block = None if arch == "sdar" else 6
    params = denoise(12, block_length=block, policy=policy, steps=8, sampling=SAMPLED)
    expected = alone(models[arch], params)
    assert together(models[arch].engine(is_native=True, max_batch_tokens=64), params) == expected
    assert (
        together(models[arch].engine(is_native=True, max_batch_tokens=20), params, preempted_in=(1, 3, 8, 13))
        == expected
    )


@pytest.mark.parametrize("cache", ["none", "block", "sub_block"])
@pytest.mark.parametrize("arch", BLOCKS)
def test_block_models_alone_together_and_preempted(models: dict[str, DiffusionModel], arch: str, cache: str) -> None:
    params = denoise(11, policy="threshold", threshold=0.05, cache=cache, sub_block_length=2, sampling=SAMPLED)
    expected = alone(models[arch], params)
    assert len({token_ids for token_ids, _ in expected}) == 4
    assert together(models[arch].engine(is_native=True, max_batch_tokens=50), params) == expected
    assert (
        together(models[arch].engine(is_native=True, max_batch_tokens=20), params, preempted_in=(2, 5, 9, 14))
        == expected
    )


@pytest.mark.parametrize("policy", ["origin", "entropy", "joint_threshold"])
def test_shifted_blocks_with_every_schedule(models: dict[str, DiffusionModel], policy: str) -> None:
    params = denoise(14, policy=policy, steps=9, sampling=SAMPLED)
    model = models["dream-blocks"]
    expected = alone(model, params)
    assert together(model.engine(is_native=True, max_batch_tokens=20), params, preempted_in=(1, 4, 9)) == expected


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 4, 6, 9])
def test_steps_of_few_rows_come_to_the_same_end(models: dict[str, DiffusionModel], max_batch_tokens: int) -> None:
    for arch, model in models.items():
        params = denoise(9, block_length=None if arch in BLOCKS else 3, sampling=SAMPLED)
        engine = model.engine(is_native=True, max_batch_tokens=max_batch_tokens)
        assert together(engine, params) == alone(model, params)


def test_a_pool_that_holds_one_canvas_serves_all_in_turn(models: dict[str, DiffusionModel]) -> None:
    for arch, canvas in (("llada-tied", "fixed"), ("llada-tied", "grow"), ("sdar", None)):
        params = denoise(24, canvas=canvas, block_length=None if arch == "sdar" else 8)
        expected = alone(models[arch], params)
        engine = models[arch].engine(is_native=True, num_blocks=4)
        assert together(engine, params) == expected
        assert engine.kv.num_free == engine.kv.num_blocks or arch == "sdar"
