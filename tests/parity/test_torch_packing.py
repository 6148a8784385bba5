"""A packed matrix holds the bits of the dequantised one; read here as the kernels read it, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvarn.formats.weights import TensorType

torch = pytest.importorskip("torch")

from kvarn.backends.torch.cuda.quantized import pack as packing  # noqa: E402
from kvarn.backends.torch.dequantize import dequantize  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

HALVES = {TensorType.Q4_1: (0, 2), TensorType.Q5_1: (0, 2), TensorType.Q4_K: (0, 2), TensorType.Q5_K: (0, 2)}


@pytest.mark.parametrize("type", list(packing.PACKINGS), ids=lambda t: t.name)
def test_packed_values_are_the_dequantised_ones(type: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = 3 * 256 if type.block_values == 256 else 5 * 96  # the last tile of small blocks is not whole
    monkeypatch.setattr(packing, "CHUNK_VALUES", 4 * depth)  # several chunks, the last a short one
    raw = _stored(type, 19 * depth)
    packed = packing.pack(raw, type, (19, depth))
    assert torch.equal(_unpack(packed), dequantize(raw, type, (19, depth), torch.float32))


def test_neighbours_of_one_type_are_one_matrix() -> None:
    q4_k, q6_k = (packing.pack(_stored(t, 4 * 512), t, (4, 512)) for t in (TensorType.Q4_K, TensorType.Q6_K))
    dense = torch.ones(2, 512)
    first, second, third = packing.stack([q4_k, q4_k, q6_k, dense, dense])
    assert torch.equal(_unpack(first), torch.cat([_unpack(q4_k)] * 2))
    assert second is q6_k
    assert third.shape == (4, 512)
    assert packing.QuantizedMatrix((first, second, third), torch.bfloat16).shape == (16, 512)


def test_packing_costs_little_more_than_the_file() -> None:
    for type in packing.PACKINGS:
        packed = packing.pack(_stored(type, 8 * 4096), type, (8, 4096))
        planes = (packed.low, packed.high, packed.scales)
        num_bytes = sum(one.numel() * one.element_size() for one in planes if one is not None)
        assert num_bytes <= 1.03 * type.num_bytes(8 * 4096)


def _stored(type: TensorType, count: int) -> Tensor:
    """Random blocks with finite scales."""
    rng = np.random.default_rng(type.id)
    blocks = rng.integers(0, 256, (count // type.block_values, type.block_bytes), np.uint8)
    for at in (208,) if type is TensorType.Q6_K else HALVES.get(type, (0,)):
        blocks[:, at : at + 2] = rng.normal(0, 0.01, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(-1))


def _unpack(matrix: packing.PackedMatrix) -> Tensor:
    bits, columns = matrix.packing.bits, matrix.shape[0]
    low = matrix.low.view(columns, matrix.tiles, 1, 32)
    groups = torch.arange(8)[:, None]
    if bits == 8:
        assert matrix.high is not None
        planes = (low, matrix.high.view(low.shape))
        quants = torch.cat([plane >> 8 * groups[:4] & 255 for plane in planes], dim=2)
    else:
        quants = low >> 4 * groups & 15
    if matrix.high is not None and bits < 8:
        more = matrix.high.view(low.shape).int()
        quants |= (more >> (bits - 4) * groups & (1 << bits - 4) - 1) << 4
    scales, minima = _scales(matrix)  # (columns, tiles, values of a tile)
    values = scales * (quants.reshape(columns, matrix.tiles, 256) - matrix.packing.zero).float() + minima
    return values.view(columns, -1)[:, : matrix.shape[1]]


def _scales(matrix: packing.PackedMatrix) -> tuple[Tensor, Tensor]:
    words = matrix.scales[:-1].T.reshape(matrix.shape[0], matrix.tiles, -1).contiguous()
    halves = words.view(torch.float16).float()
    kind, none = matrix.packing.scales, torch.zeros(1)
    if kind == packing.HALF:
        return halves.repeat_interleave(32, dim=2), none
    if kind == packing.HALF_AND_MIN:
        return halves[..., ::2].repeat_interleave(32, dim=2), halves[..., 1::2].repeat_interleave(32, dim=2)
    if kind == packing.INT8:
        small = words.view(torch.int8)[..., :16].float()
        return (halves[..., 8:9] * small).repeat_interleave(16, dim=2), none
    small = words.view(torch.uint8)[..., :16].float()
    scales, minima = halves[..., 8:9] * small[..., :8], halves[..., 9:] * small[..., 8:]
    return scales.repeat_interleave(32, dim=2), -minima.repeat_interleave(32, dim=2)
