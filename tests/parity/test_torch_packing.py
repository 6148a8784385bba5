"""A packed matrix holds the dequantised one but for roundings to bfloat16; read here as the kernels read it."""

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
TYPES = list(packing.PACKINGS)
ROUNDING = 2.0**-8  # what rounding to bfloat16 changes at most


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_packed_values_are_the_dequantised_ones_but_for_rounding(
    type: TensorType, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 3 * 256 if type.block_values == 256 else 5 * 96  # the last tile of small blocks is not whole
    monkeypatch.setattr(packing, "CHUNK_VALUES", 4 * depth)  # several chunks, the last a short one
    raw = _stored(type, 19 * depth)
    values, scales, minima = _unpack(packing.pack(raw, type, (19, depth)))
    wanted = dequantize(raw, type, (19, depth), torch.float32)
    allowed = ROUNDING * (2 ** packing.PACKINGS[type].bits * scales.abs() + 2 * minima.abs() + wanted.abs())
    assert bool(((values - wanted).abs() <= allowed).all())
    assert float((values - wanted).norm() / wanted.norm()) < 0.004


def test_a_minimum_makes_up_for_its_scale() -> None:
    """Whose error is then as small on average as a minimum's own rounding, not as that of the largest product."""
    scales, minima = torch.full((1, 1), 1 + 0.9 * ROUNDING), torch.full((1, 1), -2.0)
    word = packing._scale_words(scales, minima, packing.PACKINGS[TensorType.Q4_1])
    scale, minimum = word.view(torch.bfloat16).float().flatten().tolist()
    error = torch.arange(16) * (scale - scales.item()) + minimum - minima.item()
    assert scale != scales.item()
    assert abs(float(error.mean())) <= ROUNDING
    assert float(error.abs().max()) < 0.6 * 15 * abs(scale - scales.item()) + 2 * ROUNDING


def test_neighbours_of_one_type_are_one_matrix() -> None:
    q4_k, q6_k = (packing.pack(_stored(t, 4 * 512), t, (4, 512)) for t in (TensorType.Q4_K, TensorType.Q6_K))
    dense = torch.ones(2, 512)
    first, second, third = packing.stack([q4_k, q4_k, q6_k, dense, dense])
    assert torch.equal(_unpack(first)[0], torch.cat([_unpack(q4_k)[0]] * 2))
    assert second is q6_k
    assert third.shape == (4, 512)
    assert packing.QuantizedMatrix((first, second, third), torch.bfloat16).shape == (16, 512)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_packing_costs_what_is_planned(type: TensorType) -> None:
    packed = packing.pack(_stored(type, 8 * 4096), type, (8, 4096))
    num_bytes = sum(one.numel() * one.element_size() for one in packed.planes)
    assert num_bytes == 8 * 4096 * packing.PACKINGS[type].value_bytes
    assert num_bytes <= 1.12 * type.num_bytes(8 * 4096)


def test_numbers_in_fp8_stay_what_they_are_but_for_the_rounding_of_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(6).view(3, 512)
    codes[(codes & 127) == 127] = 0  # no number
    numbers = codes.view(torch.float8_e4m3fn).float()
    for shape in ((1, 1), (3, 1), (3, 16)):
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.01
        matrix = packing.pack_float8(codes, scales)
        values = _float8_values(matrix)
        spread = scales.to(torch.bfloat16).float().expand(3, shape[1])
        wanted = (numbers.view(3, shape[1], -1) * spread[..., None]).view(3, 512).to(torch.bfloat16)
        assert torch.equal(values, wanted)
        assert wanted.unique().numel() > 250


def test_what_bfloat16_does_not_hold_stays_floats() -> None:
    codes = torch.full((2, 64), 0x40, dtype=torch.uint8)
    assert packing.pack_float8(codes, torch.full((1, 1), 300.0)) is None
    codes[1, 3] = 0xFF
    assert packing.pack_float8(codes, torch.ones(1, 1)) is None


def test_fp8_costs_what_is_planned() -> None:
    packed = packing.pack_float8(torch.zeros((8, 4096), dtype=torch.uint8), torch.ones(1, 1))
    assert sum(one.numel() * one.element_size() for one in packed.planes) == 8 * 4096 * packing.FLOAT8.value_bytes


def _float8_values(matrix: packing.PackedMatrix) -> Tensor:
    """As the kernels make them: the bits of a number among those of a bfloat16, times the scale."""
    codes = _fields(matrix.low, 8).int()
    bits = (codes & 0x7F) << 4 | (codes & 0x80) << 8
    numbers = bits.to(torch.int16).view(torch.bfloat16)
    return (numbers * _scales(matrix)[0].to(torch.bfloat16))[:, : matrix.shape[1]]


def _stored(type: TensorType, count: int) -> Tensor:
    """Random blocks with finite scales."""
    rng = np.random.default_rng(type.id)
    blocks = rng.integers(0, 256, (count // type.block_values, type.block_bytes), np.uint8)
    for at in (208,) if type is TensorType.Q6_K else HALVES.get(type, (0,)):
        blocks[:, at : at + 2] = rng.normal(0, 0.01, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(-1))


def _unpack(matrix: packing.PackedMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and minima, (columns, depth) each."""
    packing_of, (columns, depth) = matrix.packing, matrix.shape
    bits = packing_of.bits
    quants = _fields(matrix.low, 8 if bits == 8 else 4)
    if bits == 8:
        quants = (quants ^ 128) - 128
    if matrix.high is not None:
        quants |= _fields(matrix.high, bits - 4) << 4
    scales, minima = _scales(matrix)
    products = scales * (quants - packing_of.zero).float()
    values = (products.double() + minima.double()).to(torch.bfloat16).float()
    return values[:, :depth], scales[:, :depth], minima.expand(columns, -1)[:, :depth]


def _fields(words: Tensor, bits: int) -> Tensor:
    """(units, columns, values) words to (columns, depth) integers."""
    shifts = torch.arange(16 // bits)[:, None] * bits
    fields = words.int().transpose(0, 1)[:, :, None, :] >> shifts & (1 << bits) - 1
    return fields.reshape(words.shape[1], -1)


def _scales(matrix: packing.PackedMatrix) -> tuple[Tensor, Tensor]:
    words = matrix.scales.transpose(0, 1).contiguous()  # (columns, segments, groups)
    halves = words.view(torch.bfloat16).float().reshape(len(words), -1)
    group = matrix.packing.group
    if words.dtype == torch.bfloat16:
        return halves.repeat_interleave(group, dim=1), torch.zeros(1, halves.shape[1] * group)
    return halves[:, ::2].repeat_interleave(group, dim=1), halves[:, 1::2].repeat_interleave(group, dim=1)
