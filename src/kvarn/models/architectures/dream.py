"""Dream: a Qwen2 that sees both ways and fills in masked tokens. Its head predicts the next position's token."""

from __future__ import annotations

from kvarn.models.architectures import qwen2
from kvarn.models.denoising import denoiser
from kvarn.models.facts import Facts
from kvarn.models.spec import ModelSpec


def describe(facts: Facts) -> ModelSpec:
    """Describe a Dream."""
    return denoiser(facts, qwen2.describe(facts), shift=True)
