"""SDAR: a Qwen3 that fills in masked tokens block by block, seeing both ways within a block and back before it."""

from __future__ import annotations

from kvarn.models.architectures import qwen3
from kvarn.models.diffusion.masked import as_masked_diffusion
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec

# What the first of these models were trained with; not in every config.json.
MASK_ID = 151669
BLOCK_LENGTH = 4


def describe(hparams: HParams) -> ModelSpec:
    """Describe an SDAR, dense or with experts."""
    block = hparams.integer("diffusion_block_length", default=BLOCK_LENGTH)
    return as_masked_diffusion(hparams, qwen3.describe(hparams), shift=False, block=block, mask_id=MASK_ID)
