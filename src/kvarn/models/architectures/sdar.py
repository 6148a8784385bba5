"""SDAR: a Qwen3 that fills in masked tokens block by block, seeing both ways within a block and back before it."""

from __future__ import annotations

from kvarn.models.architectures import qwen3
from kvarn.models.hparams import HParams
from kvarn.models.masked_diffusion import denoiser
from kvarn.models.spec import ModelSpec

# What the first of these models were trained with; not in every config.json.
MASK_ID = 151669
BLOCK_LENGTH = 4


def describe(facts: HParams) -> ModelSpec:
    """Describe an SDAR, dense or with experts."""
    block = facts.count("diffusion_block", default=BLOCK_LENGTH)
    return denoiser(facts, qwen3.describe(facts), shift=False, block=block, mask_id=MASK_ID)
