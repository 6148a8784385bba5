"""Autoregressive models retrained to fill in masked tokens: Tiny-A2D, Fast-dLLM v2; Open-dCoder is in qwen2.py."""

from __future__ import annotations

from collections.abc import Callable

from kvarn.models.architectures import llama, qwen2, qwen3
from kvarn.models.diffusion.masked import as_masked_diffusion
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec

FAST_DLLM_MASK_ID = 151665  # of `|<MASK>|`, which these models add to Qwen2.5's vocabulary
FAST_DLLM_BLOCK = 32
SOURCES: dict[str, Callable[[HParams], ModelSpec]] = {
    "a2d-llama": llama.describe,
    "a2d-qwen2": qwen2.described,
    "a2d-qwen3": qwen3.describe,
}


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Tiny-A2D: mdlm sees both ways everywhere, bd3lm within blocks; only block_size tells which."""
    block = hparams.integer("diffusion_block_length", default=0) or None
    if block is None:
        hparams.notes['all tokens see each other (mdlm); for bd3lm weights, add "block_size": 32 to config.json'] = None
    return as_masked_diffusion(hparams, SOURCES[hparams.architecture](hparams), shift=False, block=block)


def describe_fast_dllm(hparams: HParams) -> ModelSpec:
    """Describe a Fast-dLLM v2: a Qwen2.5 that fills in blocks, with the logits of the next position's token."""
    block = hparams.integer("diffusion_block_length", default=FAST_DLLM_BLOCK)
    return as_masked_diffusion(hparams, qwen2.described(hparams), shift=True, block=block, mask_id=FAST_DLLM_MASK_ID)
