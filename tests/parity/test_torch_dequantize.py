"""Dequantising with torch gives the bits of the definition, for any bytes a file may hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType

torch = pytest.importorskip("torch")

QUANTISED = [type for type in TensorType if type.block_values > 1]


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_random_bytes_become_the_same_floats(type: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarn.backends.torch import dequantize as ours

    monkeypatch.setattr(ours, "CHUNK_VALUES", 7 * type.block_values)  # several chunks, the last a short one
    shape = (3, 10 * type.block_values)
    raw = np.random.default_rng(type.id).integers(0, 256, type.num_bytes(30 * type.block_values), np.uint8)
    found = ours.dequantize(torch.from_numpy(raw), type, shape, torch.float32).numpy()
    np.testing.assert_array_equal(found, dequantize(raw, type, shape))  # NaN included: scales are any float16
    rounded = ours.dequantize(torch.from_numpy(raw), type, shape, torch.bfloat16)
    assert torch.equal(rounded.nan_to_num(), torch.from_numpy(found).bfloat16().nan_to_num())
