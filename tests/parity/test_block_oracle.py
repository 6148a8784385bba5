"""Tokens and numbers of passes of block diffusion equal those of the published loops, on a torch model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.diffusing import DiffusionModel, denoise, run
from tests.diffusion_models import MASK_ID
from tests.parity import block_oracle
from tests.parity.block_oracle import BlockJob
from tests.parity.test_diffusion_models import TorchModel
from tests.submitting import submit
from tests.tiny_models import VOCAB

torch = pytest.importorskip("torch")

BLOCK = 8
# Thresholds between the confidences of the tiny random models, so that steps differ and some tokens are edited.
SURE = {"llada2": 0.08, "sdar": 0.07, "dream-blocks": 0.08}
PROMPTS = [np.random.default_rng(seed).integers(6, VOCAB, length).tolist() for seed, length in enumerate((5, 8, 16, 3))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionModel]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: DiffusionModel(arch, folder, block_size=BLOCK) for arch in SURE}


def num_tokens(prompt: list[int]) -> int:
    """Up to the end of a block: published loops fill whole ones."""
    return 16 + -len(prompt) % BLOCK


def found(model: DiffusionModel, prompt: list[int], *, is_native: bool = False, **options: Any) -> Any:
    engine, events = model.engine(is_native=is_native, kv_dtype="f32"), []
    params = denoise(num_tokens(prompt), events=True, **options)
    completion = run(engine, [submit(engine, prompt, params)], events)[0]
    views = [event.canvas for event in events if event.canvas is not None]
    return completion.token_ids, len(views), views


def expected(loop: Any, arch: str, prompt: list[int], **values: Any) -> tuple[tuple[int, ...], int]:
    logits = TorchModel(arch, block_size=BLOCK).logits
    canvas = loop(logits, prompt, BlockJob(num_tokens(prompt), BLOCK, MASK_ID, SURE[arch], **values))
    return tuple(canvas.tokens[len(prompt) :]), canvas.num_passes


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("arch", ["llada2", "sdar"])
def test_a_threshold_fills_as_llada_2_does(models: dict[str, DiffusionModel], arch: str, cache: str) -> None:
    for prompt in PROMPTS:
        tokens, passes, _ = found(models[arch], prompt, policy="threshold", threshold=SURE[arch], cache=cache)
        assert (tokens, passes) == expected(block_oracle.llada2, arch, prompt)


@pytest.mark.parametrize(("arch", "edit"), [("llada2", 0.0), ("sdar", 0.0), ("sdar", 0.03)])
def test_filled_tokens_are_edited_as_llada_2_1_does(models: dict[str, DiffusionModel], arch: str, edit: float) -> None:
    num_edits = 0
    for prompt in PROMPTS[:2]:
        for limit in (16, 1, 0) if prompt is PROMPTS[0] else (3,):
            options = {"threshold": SURE[arch], "edit_threshold": edit, "max_post_edit_steps": limit}
            tokens, passes, views = found(models[arch], prompt, policy="joint_threshold", **options)
            loop = {"edit": edit, "max_post_steps": limit}
            assert (tokens, passes) == expected(block_oracle.llada2, arch, prompt, **loop)
            num_edits += _num_edits(views)
    assert num_edits > 3


@pytest.mark.parametrize("cache", ["block", "none"])
def test_shifted_blocks_are_filled_as_fast_dllm_v2_does(models: dict[str, DiffusionModel], cache: str) -> None:
    options = {"policy": "threshold", "threshold": SURE["dream-blocks"], "cache": cache}
    for prompt in PROMPTS:
        for is_native in (False, True):
            tokens, passes, _ = found(models["dream-blocks"], prompt, is_native=is_native, **options)
            assert (tokens, passes) == expected(block_oracle.fast_dllm_v2, "dream-blocks", prompt)


def test_parts_of_a_block_are_filled_as_fast_dllm_v2_does(models: dict[str, DiffusionModel]) -> None:
    options = {"policy": "threshold", "threshold": SURE["dream-blocks"], "sub_block_length": 4}
    for prompt in PROMPTS:
        tokens, passes, _ = found(models["dream-blocks"], prompt, **options)
        assert (tokens, passes) == expected(block_oracle.fast_dllm_v2, "dream-blocks", prompt, sub_block=4)


def _num_edits(views: list[Any]) -> int:
    """Tokens that changed from one canvas to the next."""
    pairs = [zip(a.token_ids, b.token_ids, strict=False) for a, b in pairwise(views)]
    return sum(a is not None and a != b for pair in pairs for a, b in pair)
