"""Dream: a Qwen2 that sees both ways, some only within blocks. Its head predicts the next position's token."""

from __future__ import annotations

from kvarn.models.architectures import qwen2
from kvarn.models.diffusion.masked import as_masked_diffusion, refuse_growing_canvas
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Dream."""
    refuse_growing_canvas(hparams)
    block = hparams.integer("diffusion_block_length", default=0) or None
    return as_masked_diffusion(hparams, qwen2.described(hparams), shift=True, block=block)
