"""LLaDA: a Llama that sees both ways and fills in masked tokens. Its head predicts the token of its own position."""

from __future__ import annotations

from kvarn.models.architectures import llada_moe, llama
from kvarn.models.diffusion.masked import as_masked_diffusion
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec


def describe(hparams: HParams) -> ModelSpec:
    """Describe a LLaDA; like a Llama's, its GGUF files hold Q and K permuted for interleaved rotation."""
    if not hparams.is_gguf and hparams.raw(None, "num_experts"):
        return llada_moe.describe(hparams)  # config.json has one model_type for both
    return as_masked_diffusion(hparams, llama.describe(hparams), shift=False)
