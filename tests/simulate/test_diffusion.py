"""Random crowds of diffusion requests: whoever comes, goes or loses its blocks, answers are those they get alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvarn.diffusion import POLICIES, POLICY_FIELDS, SparseConfig
from kvarn.formats.weights import TensorType
from kvarn.request import Request, RequestState
from kvarn.types import SamplingParams
from tests.diffusing import DiffusionModel, answer, denoise
from tests.submitting import submit
from tests.tiny_models import VOCAB

if TYPE_CHECKING:
    from tests.conftest import Size

NUM_BLOCKS = 20


def random_params(rng: np.random.Generator, arch: str) -> SamplingParams:
    policy = str(rng.choice(POLICIES))
    options: dict[str, Any] = {"policy": policy}
    if "threshold" in POLICY_FIELDS.get(policy, {}):
        options["threshold"] = float(rng.choice([0.05, 0.9]))
    if rng.random() < 0.3:
        options["steps"] = int(rng.integers(1, 30))
    if arch != "sdar":
        options |= random_cache(rng)
    sampling = {
        "temperature": float(rng.choice([0, 1])),
        "seed": int(rng.integers(9)),
        "priority": int(rng.integers(3)),
    }
    return denoise(int(rng.integers(1, 40)), sampling=sampling, **options)


def random_cache(rng: np.random.Generator) -> dict[str, Any]:
    cache = str(rng.choice(["none", "prefix", "dual", "sparse"]))
    ratio, delay = float(rng.uniform(0.1, 1)), int(rng.integers(0, 3))
    return {
        "cache": cache,
        "sparse": SparseConfig(retention_ratio=ratio, delay_step=delay) if cache == "sparse" else None,
        "block_length": int(rng.integers(1, 12)),
        "canvas": str(rng.choice(["fixed", "grow"])),
        "cfg_scale": float(rng.choice([0.0, 0.0, 0.7])),
    }


@pytest.mark.parametrize("arch", ["llada-tied", "dream", "sdar"])
def test_a_crowd_changes_nobodys_answer(arch: str, tmp_path: Path, size: Size) -> None:
    model, rng = DiffusionModel(arch, tmp_path, TensorType.Q4_0), np.random.default_rng(7)
    engine = model.engine(is_native=True, num_blocks=NUM_BLOCKS, max_batch_tokens=40, policy="priority", ageing_s=1e4)
    requests: list[Request] = []
    num_wanted = size(24, 150)
    while engine.has_work or len(requests) < num_wanted:
        if len(requests) < num_wanted and rng.random() < 0.4:
            prompt = rng.integers(3, VOCAB, rng.integers(1, 40)).tolist()
            requests.append(submit(engine, prompt, random_params(rng, arch)))
        running = [request for request in requests if request.state is RequestState.RUNNING]
        if running and rng.random() < 0.05:
            engine.scheduler.preempt(running[rng.integers(len(running))])
        if running and rng.random() < 0.02:
            running[rng.integers(len(running))].is_cancel_requested = True
        engine.step()
        engine.kv.check()
    assert engine.kv.stats().used == 0
    for request in requests:
        if request.state is RequestState.FINISHED:
            found = answer(model.engine(is_native=True), request.prompt_ids, request.params)
            assert request.output_ids == found, request.params.diffusion
    assert sum(request.state is RequestState.FINISHED for request in requests) > num_wanted / 3
