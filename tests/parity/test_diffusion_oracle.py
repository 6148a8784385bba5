"""Tokens and numbers of passes equal those of the published loops, on a torch model: every policy, with guidance."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvarn.decoding.schedules import even_count, timestep_count
from kvarn.diffusion import POLICY_FIELDS
from kvarn.sampling.philox import REMASKING, uniform
from tests.diffusing import DiffusionModel, denoise, run
from tests.diffusion_models import MASK_ID
from tests.parity import diffusion_oracle as oracle
from tests.parity.diffusion_oracle import DREAM_POLICIES, LLADA_POLICIES, PARALLEL_POLICIES, Job
from tests.parity.test_diffusion_models import TorchModel
from tests.submitting import submit
from tests.tiny_models import VOCAB

torch = pytest.importorskip("torch")

SEED = 3
NUM_TOKENS = 24
RENAMED = {"relaxed_threshold": "relaxed", "low_threshold": "low", "edit_threshold": "edit"}
# Tiny random models are not sure of much: thresholds between their confidences, so that steps differ.
HIGH = {
    ("llada", 0.0): 0.12,
    ("llada", 1.5): 0.15,
    ("dream", 0.0): 0.065,
    ("dream", 1.5): 0.25,
    ("llada-moe", 0.0): 0.055,
}
ENTROPY = {("llada", 0.0): 4.2, ("llada", 1.5): 4.0, ("dream", 0.0): 4.4, ("dream", 1.5): 4.2, ("llada-moe", 0.0): 4.45}


def soft(arch: str, cfg_scale: float) -> dict[str, Any]:
    high = HIGH[arch, cfg_scale]
    return {
        "threshold": high,
        "relaxed_threshold": 0.85 * high,
        "low_threshold": 0.9 * high,
        "edit_threshold": 0.8 * high,
        "factor": 3 * (1 - high),
        "entropy_threshold": ENTROPY[arch, cfg_scale],
        "radius": 2,
    }


PROMPTS = [np.random.default_rng(seed).integers(6, VOCAB, 3 + 5 * seed).tolist() for seed in range(2)]


def lots(position: int, step: int) -> float:
    return uniform(SEED, position, 0, REMASKING, step)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionModel]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: DiffusionModel(arch, folder) for arch in ("llada", "dream", "llada-moe")}


@functools.cache
def torch_model(arch: str) -> TorchModel:
    return TorchModel(arch)


def expected(arch: str, prompt: list[int], job: Job) -> tuple[tuple[int, ...], int]:
    canvas = oracle.generate(torch_model(arch).logits, prompt, replace(job, shift=arch == "dream"))
    return tuple(canvas.tokens[len(prompt) :]), canvas.num_passes


def found(model: DiffusionModel, prompt: list[int], num_tokens: int = NUM_TOKENS, **options: Any) -> Any:
    engine, events = model.engine(), []
    params = denoise(num_tokens, cache="none", events=True, sampling={"seed": SEED}, **options)
    completion = run(engine, [submit(engine, prompt, params)], events)[0]
    return completion.token_ids, sum(event.canvas is not None for event in events)


def options_and_job(
    arch: str, policy: str, block: int, steps: int | None, cfg_scale: float
) -> tuple[dict[str, Any], Job]:
    """The same for the engine and for the oracle. steps: of a block."""
    values = soft(arch, cfg_scale)
    limits = {name: values[name] for name in POLICY_FIELDS.get(policy, {}) if name in values}
    ours = {"block_length": block, "policy": policy, "cfg_scale": cfg_scale, **limits}
    ours["steps"] = None if steps is None else steps * (NUM_TOKENS // block)
    theirs = {RENAMED.get(name, name): value for name, value in limits.items()}
    job = Job(NUM_TOKENS, block, policy, MASK_ID, steps, cfg_scale=cfg_scale, lots=lots, **theirs)
    return ours, job


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
@pytest.mark.parametrize("policy", LLADA_POLICIES + DREAM_POLICIES + PARALLEL_POLICIES)
@pytest.mark.parametrize("arch", ["llada", "dream"])
def test_every_policy_follows_its_published_loop(
    models: dict[str, DiffusionModel], arch: str, policy: str, cfg_scale: float
) -> None:
    block = NUM_TOKENS if policy in DREAM_POLICIES else 8
    steps = None if policy in PARALLEL_POLICIES else 10 if policy in DREAM_POLICIES else 3
    options, job = options_and_job(arch, policy, block, steps, cfg_scale)
    passes = []
    for prompt in PROMPTS[1:] if cfg_scale else PROMPTS:
        answer = found(models[arch], prompt, **options)
        assert answer == expected(arch, prompt, job)
        passes.append(answer[1])
    if policy in PARALLEL_POLICIES[:-1] and not cfg_scale:  # some steps fill more than one position, and not all do
        assert NUM_TOKENS // block * len(PROMPTS) < sum(passes) < NUM_TOKENS * len(PROMPTS)


@pytest.mark.parametrize("policy", LLADA_POLICIES + DREAM_POLICIES + PARALLEL_POLICIES)
def test_experts_steps_and_blocks_follow_it_too(models: dict[str, DiffusionModel], policy: str) -> None:
    options, job = options_and_job("llada-moe", policy, 12, 5, 0.0)
    assert found(models["llada-moe"], PROMPTS[1], **options) == expected("llada-moe", PROMPTS[1], job)


@pytest.mark.parametrize("arch", ["llada", "dream"])
def test_the_native_backend_follows_them_with_a_cache_of_f32_and_nearly_always_with_f16(
    models: dict[str, DiffusionModel], arch: str
) -> None:
    same = {"f32": 0, "f16": 0}
    policies = LLADA_POLICIES + DREAM_POLICIES + PARALLEL_POLICIES
    for policy in policies:
        options, job = options_and_job(arch, policy, NUM_TOKENS if policy in DREAM_POLICIES else 8, None, 0.0)
        tokens, _ = expected(arch, PROMPTS[1], job)
        for kv_dtype in same:
            engine = models[arch].engine(is_native=True, kv_dtype=kv_dtype)
            params = denoise(NUM_TOKENS, cache="none", sampling={"seed": SEED}, **options)
            same[kv_dtype] += run(engine, [submit(engine, PROMPTS[1], params)])[0].token_ids == tokens
    assert same["f32"] == len(policies)
    assert same["f16"] >= len(policies) - 3


def test_guidance_changes_the_answer(models: dict[str, DiffusionModel]) -> None:
    answers = {found(models["llada"], PROMPTS[1], block_length=8, cfg_scale=scale)[0] for scale in (0.0, 0.5, 4.0)}
    assert len(answers) == 3


def test_the_policies_do_not_all_choose_alike(models: dict[str, DiffusionModel]) -> None:
    policies = ("low_confidence", "random", "maskgit_plus", "topk_margin", "entropy", "origin")
    answers = {found(models["dream"], PROMPTS[1], block_length=NUM_TOKENS, steps=6, policy=p)[0] for p in policies}
    assert len(answers) >= 5


def test_the_timestep_schedule_counts_as_float32_arithmetic_does() -> None:
    """The published loop computes times and counts with torch's float32."""
    for steps in (1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 256, 512):
        times = torch.linspace(1, 1e-3, steps + 1)
        for start in (1, 5, 32, 96, 256):
            left = start
            for step in range(steps):
                share = 1 - times[step + 1] / times[step]
                count = int(torch.tensor(float(left)) * share) if step < steps - 1 else left
                assert timestep_count(left, steps, step) == count
                left -= count
            assert left == 0


def test_the_even_schedule_fills_everything_in_its_steps() -> None:
    for num_masked in (1, 5, 32, 100):
        for steps in (1, 3, 32, 40):
            counts = [even_count(num_masked, steps, step) for step in range(steps)]
            assert counts == oracle.even_shares(num_masked, steps)
            assert sum(counts) == num_masked
