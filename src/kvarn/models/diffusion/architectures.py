"""Which models denoise: entries of the registry."""

from __future__ import annotations

from typing import Final

from kvarn.models.architectures import a2d, diffusion_gemma, dream, llada, llada2, llada_moe, sdar
from kvarn.models.architectures.entry import Architecture

TRANSCRIPTION: Final = "a transcription of its authors' code"
MASKED: Final = "transformers, with another mask"
DIFFUSION: Final = (
    Architecture("LLaDA", ("llada",), ("llada",), llada.describe, oracle=MASKED),
    Architecture("LLaDA-MoE", ("llada-moe",), ("llada_moe",), llada_moe.describe, oracle=MASKED),
    Architecture(
        "LLaDA 2.0, LLaDA 2.1",
        ("llada2",),
        ("llada2_moe", "llada2_moe_veomni"),
        llada2.describe,
        oracle=TRANSCRIPTION,
    ),
    Architecture("Dream, Dream-Coder, DiffuCoder", ("dream",), ("Dream", "dream"), dream.describe, oracle=MASKED),
    Architecture("Fast-dLLM v2", (), ("Fast_dLLM_Qwen",), a2d.describe_fast_dllm, oracle=MASKED),
    Architecture("Tiny-A2D", (), ("a2d-llama", "a2d-qwen2", "a2d-qwen3"), a2d.describe, oracle=MASKED),
    Architecture(
        "DiffusionGemma (text)",
        ("diffusion-gemma",),
        ("diffusion_gemma_text",),
        diffusion_gemma.describe,
        "two_way",
        split=diffusion_gemma.separate,
    ),
    Architecture("SDAR", ("sdar",), ("sdar", "sdar_moe"), sdar.describe, oracle=MASKED),
)
