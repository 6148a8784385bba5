"""LoRA adapters of tiny models: random pairs as a PEFT folder or a GGUF file, and the weights they amount to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from kvarn.formats.gguf.writer import write_gguf
from tests.chat_model import HIDDEN, LAYERS, WIDTH
from tests.tiny_gguf import Tensors, unrotated

Float32 = npt.NDArray[np.float32]
Pairs = dict[str, tuple[Float32, Float32]]  # A and B by module, as PEFT names them: without `.weight`

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "tests/tiny",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0.05,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
    "inference_mode": True,
    "target_modules": ["q_proj"],
}


def random_pairs(
    tensors: Mapping[str, npt.NDArray[Any]],
    parts: tuple[str, ...] = LINEARS,
    rank: int = 4,
    *,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
) -> Pairs:
    """A pair for every matrix whose module ends in one of parts; ranks: of modules that have another one."""
    rng, pairs = np.random.default_rng(seed), {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if values.ndim != 2 or module.rpartition(".")[2] not in parts:
            continue
        rows, columns = values.shape
        if "embed" in module:  # it maps tokens to states
            rows, columns = columns, rows
        r = next((own for end, own in (ranks or {}).items() if module.endswith(end)), rank)
        a, b = rng.standard_normal((r, columns)) / np.sqrt(columns), rng.standard_normal((rows, r)) / 2
        pairs[module] = (a.astype(np.float32), b.astype(np.float32))
    assert pairs
    return pairs


def chat_model_pairs(seed: int) -> Pairs:
    """For the model of tests/chat_model.py: pairs that change what is said, not only its probability."""
    shapes = {
        **{f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qkvo"},
        **{f"mlp.{part}_proj": (HIDDEN, WIDTH) for part in ("gate", "up")},
        "mlp.down_proj": (WIDTH, HIDDEN),
    }
    names = {f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in names.items()}
    return {module: (a, 4 * b) for module, (a, b) in random_pairs(tensors, seed=seed).items()}


def write_peft(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """A PEFT folder with these pairs; None removes a field."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (CONFIG | config).items() if value is not None or name in config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    tensors = {}
    for module, (a, b) in pairs.items():
        names = ("lora_embedding_A", "lora_embedding_B") if "embed" in module else ("lora_A.weight", "lora_B.weight")
        for name, values in zip(names, (a, b), strict=True):
            tensors[f"base_model.model.{module}.{name}"] = np.ascontiguousarray(values)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf_adapter(path: Path, config: Mapping[str, Any], arch: str, pairs: Pairs, alpha: float = 6.0) -> Path:
    """A GGUF adapter with these pairs, named by the `gguf` package, with Q and K in llama's order of rows."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors: Tensors = {}
    for module, (a, given) in pairs.items():
        canonical, b = names.get_name(module), given
        assert canonical is not None, module
        if arch == "llama" and ("q_proj" in module or "k_proj" in module):
            b = unrotated(b, config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
        tensors[f"{canonical}.weight.lora_a"] = np.ascontiguousarray(a.T) if "embed" in module else a
        tensors[f"{canonical}.weight.lora_b"] = np.ascontiguousarray(b)
    metadata = {
        "general.architecture": arch,
        "general.type": "adapter",
        "general.base_model.0.name": "Tiny",
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    write_gguf(path, metadata, tensors)
    return path


def merged(tensors: Tensors, pairs: Pairs, scales: Mapping[str, float]) -> Tensors:
    """W + s B A of every pair; scales by module."""
    found = dict(tensors)
    for module, (a, b) in pairs.items():
        change = scales[module] * (b.astype(np.float64) @ a.astype(np.float64))
        change = change.T if "embed" in module else change
        found[f"{module}.weight"] = (tensors[f"{module}.weight"] + change).astype(np.float32)
    return found
