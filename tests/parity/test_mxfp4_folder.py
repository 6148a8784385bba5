"""A gpt-oss folder as it is published: experts in MXFP4, the values those that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_families import family_folder

torch = pytest.importorskip("torch")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 100, 29)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model with experts in MXFP4 and in F32, and random codes in both."""
    _, plain = family_folder("gpt_oss", 0, tmp_path)
    rng, dense = np.random.default_rng(0), load_file(plain / "model.safetensors")
    packed: dict[str, Any] = {}
    for name in list(dense):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = dense[name]
            continue
        experts, columns, rows = dense[name].shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(118, 122, (experts, rows, columns // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
        dense[name] = np.ascontiguousarray(found.float().numpy())
        assert dense[name].shape == (experts, columns, rows)
    published = tmp_path / "published"
    published.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(packed, published / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    return published, plain


def test_the_values_and_logits_are_those_of_the_dense_folder(folders: tuple[Path, Path]) -> None:
    published, plain = (describe(open_weights(folder)) for folder in folders)
    assert published.spec == plain.spec
    assert published.weights.tensors.keys() == plain.weights.tensors.keys()
    for name in plain.weights.tensors:
        np.testing.assert_array_equal(published.weights.array(name), plain.weights.array(name))
    logits = []
    for backend, described in (
        (ReferenceBackend(), plain),
        (ReferenceBackend(), published),
        (NativeBackend(1), published),
    ):
        backend.load(described.spec, described.weights)
        layout = layout_of(described.spec)
        backend.reserve_kv(layout, 4 * layout.block_bytes)
        logits.append(all_logits(backend, scattered_table(4, 2), IDS, (len(IDS),)))
    np.testing.assert_array_equal(logits[1], logits[0])
    away = np.linalg.norm(logits[2] - logits[0], axis=-1) / np.linalg.norm(logits[0], axis=-1)
    # The activations of int8 products are rounded; the median, because a row near a tie may go to another expert.
    assert np.median(away) < 0.04


def test_half_a_pair_and_another_method_are_refused(folders: tuple[Path, Path]) -> None:
    published, _ = folders
    tensors = load_file(published / "model.safetensors")
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(UnsupportedModel, match=r"bitsandbytes.*mxfp4"):
        describe(open_weights(published))
    (published / "config.json").write_text(json.dumps(config))
    for lost in ("_blocks", "_scales"):
        name = f"model.layers.0.mlp.experts.down_proj{lost}"
        save_file({key: value for key, value in tensors.items() if key != name}, published / "model.safetensors")
        with pytest.raises(FormatError, match="down_proj_blocks is"):
            open_weights(published)
