"""Adapters that PEFT itself made and wrote, against what PEFT computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.lora_files import LINEARS, Float32
from tests.parity.test_lora import IDS, check
from tests.tiny_models import tiny_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

QUERIES = ["q_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": list(LINEARS)},
    "all linear": {"target_modules": "all-linear"},
    "a pattern of names": {"target_modules": r".*layers\.1\..*(q|v|up)_proj"},
    "one layer": {"target_modules": QUERIES, "layers_to_transform": [1], "layers_pattern": "layers"},
    "rslora": {"target_modules": QUERIES, "use_rslora": True, "r": 16},
    "patterns": {
        "target_modules": QUERIES,
        "rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"down_proj": 3, r"^model\.layers\.0\.self_attn\.q_proj": 12},
    },
    "patterns and rslora": {"target_modules": QUERIES, "use_rslora": True, "rank_pattern": {r"0\.mlp\.down_proj": 2}},
    "embedding": {"target_modules": ["embed_tokens", *QUERIES]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", *QUERIES]},
}


def trained(base: Path, folder: Path, **options: Any) -> Float32:
    """Write an adapter with random pairs as PEFT does; its logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    made = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.copy_(torch.randn(values.shape, generator=made) / values.shape[-1] ** 0.5)
        model.save_pretrained(folder)
        logits: Float32 = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_is_what_peft_makes_of_it(
    variant: str, format: Literal["safetensors", "gguf"], tmp_path: Path
) -> None:
    expected = trained(tiny_model("llama", tmp_path), tmp_path / "adapter", **VARIANTS[variant])
    check(tiny_model("llama", tmp_path, format), tmp_path / "adapter", expected)


@pytest.mark.parametrize("arch", ["llama-tied", "qwen2", "phi3", "gemma2", "qwen3", "mistral"])
def test_an_adapter_of_another_architecture_is_what_peft_makes_of_it(arch: str, tmp_path: Path) -> None:
    base = tiny_model(arch, tmp_path)
    check(base, tmp_path / "adapter", trained(base, tmp_path / "adapter", target_modules="all-linear"))
