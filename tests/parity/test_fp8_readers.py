"""FP8 folders as transformers reads them, on a CPU: its own `fp8`, and compressed-tensors where that is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvarn
from tests.unit.quantization.test_folders import write_folder
from tests.unit.quantization.test_fp8 import WIDE, dequantized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("scheme", "package"),
    [("FP8_BLOCK", "accelerate"), ("FP8_ROW", "compressed_tensors"), ("FP8_TENSOR", "compressed_tensors")],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_transformers_computes_with_the_same_weights(scheme: str, package: str, arch: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    folder = write_folder(tmp_path / "folder", arch, **WIDE)
    kvarn.quantize(folder, scheme, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: torch.from_numpy(v.astype(np.float32)) for name, v in dequantized(tmp_path / "out").items()}
    plain.load_state_dict(weights, strict=False)
    if scheme == "FP8_BLOCK":
        model.float()  # what was dequantised is F32, the rest as it was stored
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        found, expected = (one.eval()(ids).logits.float() for one in (model, plain))
    error = float((found - expected).norm() / expected.norm())
    # transformers' fp8 dequantises to the scales' type; compressed-tensors also rounds activations to FP8
    assert error < (0.01 if scheme == "FP8_BLOCK" else 0.1), error
