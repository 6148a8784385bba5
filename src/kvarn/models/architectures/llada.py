"""LLaDA: a Llama that sees both ways and fills in masked tokens. Its head predicts the token of its own position."""

from __future__ import annotations

from kvarn.models.architectures import llada_moe, llama
from kvarn.models.hparams import HParams
from kvarn.models.masked_diffusion import denoiser
from kvarn.models.spec import ModelSpec


def describe(facts: HParams) -> ModelSpec:
    """Describe a LLaDA; like a Llama's, its GGUF files hold Q and K permuted for interleaved rotation."""
    if not facts.is_gguf and facts.raw(None, "num_experts"):
        return llada_moe.describe(facts)  # config.json has one model_type for both
    return denoiser(facts, llama.describe(facts), shift=False)
