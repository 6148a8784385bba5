"""Quantised folders on a device whose kernels read packed matrices: what stays packed, its values, what is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvarn.formats.open import open_weights
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import TensorType, float8_of
from kvarn.models.describe import describe
from tests.parity.test_quantized_folders import folders
from tests.parity.test_torch_packing import _float8_values

torch = pytest.importorskip("torch")

from kvarn.backends.torch.cuda.quantized.pack import FLOAT8, PACKINGS, PackedMatrix  # noqa: E402
from kvarn.backends.torch.device import Device  # noqa: E402
from kvarn.backends.torch.loading.reader import WeightReader  # noqa: E402

DEVICE = Device(torch.device("cpu"), torch.bfloat16)
KEPT = {type: packing.value_bytes for type, packing in PACKINGS.items()}
OUTPUT = "blk.0.attn_output.weight"


def held(path: Path, float8_bytes: float | None = FLOAT8.value_bytes) -> DenseWeights:
    """The weights of a folder as a GPU holds them."""
    return DenseWeights(describe(open_weights(path)).weights, TensorType.BF16, KEPT, float8_bytes)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-rows"])
def test_matrices_in_fp8_stay_so(name: str, tmp_path: Path) -> None:
    quantised, _ = folders(name, tmp_path)
    weights = held(quantised)
    matrix = WeightReader(weights, DEVICE, None, packs=True).matrix(OUTPUT)
    (part,) = matrix.parts
    assert part.type_name == "F8_E4M3"
    exact = torch.from_numpy(weights.array(OUTPUT))
    assert float((_float8_values(part).float() - exact).abs().max() / exact.abs().max()) < 2.0**-7
    names = [one for one in weights.tensors if float8_of(weights.stored, one)]
    assert len(names) == sum(info.type is TensorType.F16 for info in weights.stored.tensors.values())
    saved = held(quantised, None).held_bytes - weights.held_bytes
    assert saved == sum((2 - FLOAT8.value_bytes) * weights.tensors[one].num_values for one in names)


def test_scales_of_blocks_are_those_of_their_columns(tmp_path: Path) -> None:
    quantised, _ = folders("fp8-blocks-experts", tmp_path)
    weights = held(quantised)
    found = float8_of(weights.stored, OUTPUT)
    assert found is not None
    codes, scales = found.read()
    decoded = torch.from_numpy(np.array(codes)).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decoded * np.repeat(scales, 32, axis=1), weights.array(OUTPUT))
    experts = next(name for name in weights.tensors if "_exps" in name)
    assert experts not in weights.float8_names  # stacks are held as floats
    assert WeightReader(weights, DEVICE, None, packs=True).dense(experts).dtype is torch.bfloat16


def test_rows_of_one_stored_matrix_have_their_own_scales(tmp_path: Path) -> None:
    quantised, _ = folders("fp8-rows", tmp_path)
    found = float8_of(describe(open_weights(quantised)).weights, OUTPUT)
    assert found is not None
    (codes, scales), (some_codes, some_scales) = found.read(), replace(found, begin=3, end=5).read()
    np.testing.assert_array_equal(some_codes, codes[3:5])
    np.testing.assert_array_equal(some_scales, scales[3:5])


def test_without_kernels_nothing_stays_in_fp8(tmp_path: Path) -> None:
    quantised, _ = folders("fp8-rows", tmp_path)
    assert held(quantised, None).float8_names == frozenset()
    reader = WeightReader(held(quantised), DEVICE, None)
    assert reader.matrix(OUTPUT).dtype is torch.bfloat16
    assert not reader.has_packed


def test_integers_of_eight_bits_stay_packed_as_q8_0(tmp_path: Path) -> None:
    quantised, _ = folders("int8", tmp_path)
    (part,) = WeightReader(held(quantised), DEVICE, None, packs=True).matrix(OUTPUT).parts
    assert isinstance(part, PackedMatrix)
    assert part.type_name == "Q8_0"
