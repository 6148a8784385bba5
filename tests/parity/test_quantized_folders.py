"""Whole models as quantised folders: the logits are those of the same values as floats, in every backend."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import ModelError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.quantized_folders import awq, fp8, gptq, integers, packed, save
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_models import VOCAB, tiny_model
from tests.torch_backend import torch_cpu

Float32 = npt.NDArray[np.float32]
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 29)]
LINEAR = re.compile(r"layers\.\d+\..*(proj|w[123])\.weight$")
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT4 = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}}
INT8 = {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any], TensorType]] = {
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4}, lambda r, s: gptq(r, s, 32), TensorType.Q4_0),
    "gptq-asymmetric": (
        "qwen2",
        {"quant_method": "gptq", "bits": 4, "sym": False},
        lambda r, s: gptq(r, s, 32, symmetric=False),
        TensorType.Q5_0,
    ),
    "gptq-act-order": (
        "llama",
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda r, s: gptq(r, s, 32, shuffled=True),
        TensorType.F16,
    ),
    "awq-experts": ("mixtral", {"quant_method": "awq", "bits": 4}, lambda r, s: awq(r, s, 32), TensorType.Q5_0),
    "packed-fused": ("phi3", COMPRESSED | INT4, lambda r, s: packed(r, s, 32), TensorType.Q4_0),
    "fp8-tensor": ("qwen3", {"quant_method": "fp8"}, lambda r, s: fp8(r, s, s), TensorType.F16),
    "fp8-rows": (
        "llama",
        COMPRESSED | {"format": "float-quantized", "config_groups": {"group_0": {"weights": FP8_ROWS}}},
        lambda r, s: fp8(r, s, (1, s[1])),
        TensorType.F16,
    ),
    "fp8-blocks-experts": (
        "qwen3moe",
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        lambda r, s: fp8(r, s, (16, 32), "weight_scale_inv"),
        TensorType.F16,
    ),
    "int8": ("qwen3", COMPRESSED | INT8, integers, TensorType.Q8_0),
}


def folders(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """The quantised folder and one with the same values as floats."""
    arch, config, make, _ = CASES[name]
    dense = tiny_model(arch, tmp_path / "dense")
    quantised = tmp_path / "quantised"
    shutil.copytree(dense, quantised)
    rng, tensors = np.random.default_rng(0), load_file(dense / "model.safetensors")
    stored = dict(tensors)
    for tensor in [one for one in tensors if LINEAR.search(one)]:
        parts, tensors[tensor] = make(rng, stored.pop(tensor).shape)
        stored |= {f"{tensor.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    save(tensors, dense / "model.safetensors")
    save(stored, quantised / "model.safetensors")
    written = json.loads((quantised / "config.json").read_text()) | {"quantization_config": config}
    (quantised / "config.json").write_text(json.dumps(written))
    return quantised, dense


def logits_of(backend: Backend, path: Path) -> Float32:
    described = describe(open_weights(path))
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec)
    backend.reserve_kv(layout, 4 * layout.block_bytes)
    return all_logits(backend, scattered_table(4, 2), IDS, (len(IDS),))


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    quantised, dense = folders(name, tmp_path)
    described, plain = (describe(open_weights(path)) for path in (quantised, dense))
    assert described.spec == plain.spec
    assert described.weights.tensors.keys() == plain.weights.tensors.keys()
    assert CASES[name][3] in {info.type for info in described.weights.tensors.values()}
    assert any(CASES[name][3].name in note for note in described.notes)
    expected = logits_of(ReferenceBackend(), dense)
    assert np.std(expected) > 0.1
    np.testing.assert_array_equal(logits_of(ReferenceBackend(), quantised), expected)
    native, torch = logits_of(NativeBackend(1), quantised), logits_of(torch_cpu(), quantised)
    # The activations of int8 products are rounded, in torch nothing but the weights; a row may go to another expert.
    for logits, limit in ((native, 0.04), (torch, 0.002)):
        away = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert np.median(away) < limit


def test_a_quantised_matrix_that_would_be_turned_round_is_refused(tmp_path: Path) -> None:
    """GPT-2 stores its matrices the other way; the blocks of a quantised one lie along the wrong axis."""
    torch_families = pytest.importorskip("tests.tiny_families")
    _, path = torch_families.family_folder("gpt2", 0, tmp_path)
    stored = load_file(path / "model.safetensors")
    name = next(one for one in stored if one.endswith("h.0.attn.c_attn.weight"))
    parts, _ = gptq(np.random.default_rng(0), stored.pop(name).shape[::-1], 32)
    stored |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ModelError, match="quantised GPT-2"):
        describe(open_weights(path))
