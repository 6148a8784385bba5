"""Quantised matrices in the layout of the kernels. Knows bits and bytes; multiplies nothing.

A column of the product is a row of the matrix. Its values are taken in segments of 64 (32 of types with 5 or 6 bits);
word j of some segments holds value j of each of them, so that a tile of words unpacks to tiles of values of the same
shape, and no value changes its thread:

    low    int16 (units, columns, segment)   four bits of each of four segments, or a byte of each of two
    high   int16 (units, columns, segment)   of types with 5 or 6 bits: the bits above, of sixteen or eight segments
    scales (segments, columns, groups)       a bfloat16 for each group of 32 or 16 values; with minima int32, both

A value is what one rounding gives: bfloat16(scale x (integer - zero) + minimum), where scale and minimum have been
rounded to bfloat16 before, the minimum so that it makes up for the scale's error at the middle of the integers. Bytes
may also be numbers in FP8: value = bfloat16(scale x number).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.torch.dequantize import affine_scales, bits_of, half, nibbles, small_scales, spread
from kvarn.formats.weights import TensorType

PIECE = 1024  # values of a column that are one chain of sums
CHUNK_VALUES = 1 << 24  # temporaries stay small beside the result
E4M3 = -1  # as the integer that means 0: bytes are numbers, four bits of exponent and three of mantissa
E4M3_SHIFT = 120.0  # what the exponents of those numbers lack when their bits stand in a bfloat16: scales have it


@dataclass(frozen=True, slots=True)
class Packing:
    """How a type is packed: bits of a value, the integer that means 0, values to a scale."""

    bits: int
    zero: int
    group: int
    has_min: bool = False

    @property
    def value_bytes(self) -> float:
        """What a value takes with its share of scales."""
        return self.bits / 8 + (4 if self.has_min else 2) / self.group

    @property
    def segment(self) -> int:
        """Values that one load of words holds in one field."""
        return 32 if self.bits in (5, 6) else 64

    @property
    def per_low(self) -> int:
        """Segments that a word of low holds."""
        return 2 if self.bits == 8 else 4

    @property
    def per_high(self) -> int:
        """Segments that a word of high holds; 1: there is no high."""
        return 16 // (self.bits - 4) if self.bits in (5, 6) else 1

    @property
    def tile(self) -> int:
        """Values of a column that are whole words."""
        return 512 if self.bits == 5 else 256


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """(columns, depth) values of one type."""

    type_name: str
    packing: Packing
    shape: tuple[int, int]
    low: Tensor
    high: Tensor | None
    scales: Tensor

    @property
    def tiles(self) -> int:
        return -(-self.shape[1] // self.packing.tile)

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return (self.low, self.scales) if self.high is None else (self.low, self.high, self.scales)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Matrices under each other: packed ones of different types, and dense ones between them."""

    parts: tuple[PackedMatrix | Tensor, ...]
    dtype: torch.dtype  # what its values are rounded to

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def types(self) -> tuple[str, ...]:
        """What its products depend on beside the shape."""
        return tuple(f"{_type_name(part)} {part.shape[0]}" for part in self.parts)

    @property
    def device(self) -> torch.device:
        first = self.parts[0]
        return first.device if isinstance(first, Tensor) else first.low.device

    def __len__(self) -> int:
        return self.shape[0]


def pack(raw: Tensor, type: TensorType, shape: tuple[int, int]) -> PackedMatrix:
    """Repack a stored matrix; raw holds exactly its bytes."""
    blocks, packing = raw.view(shape[0], -1, type.block_bytes), PACKINGS[type]
    read = STORED[type]

    def rows(some: slice) -> tuple[Tensor, Tensor]:
        stored = blocks[some]
        flat = stored.reshape(-1, type.block_bytes)
        words = _scale_words(*read.scales(flat), packing)
        return read.quants(flat).reshape(len(stored), -1), words.view(len(stored), -1)

    return _packed(type.name, packing, shape, rows)


def pack_float8(codes: Tensor, scales: Tensor) -> PackedMatrix | None:
    """Repack a matrix in FP8 (formats.weights.Float8Matrix); None: bfloat16 does not hold it, or it has no numbers."""
    columns, depth = codes.shape
    words = (scales.to(codes.device) * 2.0**E4M3_SHIFT).to(torch.bfloat16)
    if not bool(torch.isfinite(words).all()) or bool(((codes & 127) == 127).any()):
        return None
    words = words.expand(columns, depth // FLOAT8.group)
    return _packed("F8_E4M3", FLOAT8, (columns, depth), lambda some: (codes[some], words[some]))


def _packed(
    name: str, packing: Packing, shape: tuple[int, int], rows: Callable[[slice], tuple[Tensor, Tensor]]
) -> PackedMatrix:
    """rows: integers (columns, depth) and words of scales (columns, groups) of some columns."""
    step = max(1, CHUNK_VALUES // shape[1])
    chunks = [_pack_rows(*rows(slice(begin, begin + step)), packing) for begin in range(0, shape[0], step)]
    low, high, scales = ([part for part in parts if part is not None] for parts in zip(*chunks, strict=True))
    return PackedMatrix(
        name, packing, shape, torch.cat(low, dim=1), torch.cat(high, dim=1) if high else None, torch.cat(scales, dim=1)
    )


def stack(parts: Sequence[PackedMatrix | Tensor]) -> list[PackedMatrix | Tensor]:
    """Neighbours of one type as one matrix."""
    found: list[PackedMatrix | Tensor] = []
    for part in parts:
        if found and _type_name(found[-1]) == _type_name(part):
            found[-1] = _join(found[-1], part)
        else:
            found.append(part)
    return found


def _join(first: PackedMatrix | Tensor, second: PackedMatrix | Tensor) -> PackedMatrix | Tensor:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        assert isinstance(first, Tensor), "of one type"
        assert isinstance(second, Tensor), "of one type"
        return torch.cat([first, second])
    high = None if first.high is None or second.high is None else torch.cat([first.high, second.high], dim=1)
    shape = (first.shape[0] + second.shape[0], first.shape[1])
    low, scales = (torch.cat(pair, dim=1) for pair in ((first.low, second.low), (first.scales, second.scales)))
    return PackedMatrix(first.type_name, first.packing, shape, low, high, scales)


def _type_name(part: PackedMatrix | Tensor) -> str:
    return "dense" if isinstance(part, Tensor) else part.type_name


def _pack_rows(quants: Tensor, words: Tensor, packing: Packing) -> tuple[Tensor, Tensor | None, Tensor]:
    columns, padding = len(quants), -quants.shape[1] % packing.tile  # padded by zeros, whose scales are 0
    segments = torch.nn.functional.pad(quants, (0, padding)).view(columns, -1, packing.segment).int()
    words = torch.nn.functional.pad(words, (0, padding // packing.group))
    words = words.view(columns, -1, packing.segment // packing.group).transpose(0, 1)
    if packing.bits in (4, 8):
        return _fields(segments, packing.bits), None, words.contiguous()
    return _fields(segments & 15, 4), _fields(segments >> 4, packing.bits - 4), words.contiguous()


def _scale_words(scales: Tensor, minima: Tensor | None, packing: Packing) -> Tensor:
    rounded = scales.to(torch.bfloat16)
    if minima is None:
        return rounded
    middle = ((1 << packing.bits) - 1) / 2
    least = (minima + (scales - rounded.float()) * middle).to(torch.bfloat16)
    return torch.stack([rounded, least], dim=-1).view(torch.int32)


def _fields(segments: Tensor, bits: int) -> Tensor:
    """(columns, segments, values) integers as (units, columns, values) words of 16 bits."""
    columns, _, length = segments.shape
    parts = segments.view(columns, -1, 16 // bits, length)
    words = torch.zeros_like(parts[:, :, 0])
    for index in range(16 // bits):
        words |= parts[:, :, index] << bits * index
    return words.to(torch.int16).transpose(0, 1).contiguous()


def _q6_k(stored: Tensor) -> Tensor:
    return spread(stored[:, :128], 64, 4) | spread(stored[:, 128:192], 32, 2) << 4


def _one_scale(stored: Tensor) -> tuple[Tensor, None]:
    return half(stored, 0), None


def _scale_and_min(stored: Tensor) -> tuple[Tensor, Tensor]:
    return half(stored, 0), half(stored, 2)


def _six_bit_scales(stored: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = affine_scales(stored)
    return scales, -minima


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """What a block of a type holds: (blocks, bytes) -> ..."""

    quants: Callable[[Tensor], Tensor]  # (blocks, values) uint8
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # (blocks, groups) float32, and the minima


T = TensorType
STORED: dict[TensorType, StoredBlocks] = {
    T.Q4_0: StoredBlocks(lambda b: nibbles(b[:, 2:]), _one_scale),
    T.Q4_1: StoredBlocks(lambda b: nibbles(b[:, 4:]), _scale_and_min),
    T.Q5_0: StoredBlocks(lambda b: nibbles(b[:, 6:]) | bits_of(b[:, 2:6]) << 4, _one_scale),
    T.Q5_1: StoredBlocks(lambda b: nibbles(b[:, 8:]) | bits_of(b[:, 4:8]) << 4, _scale_and_min),
    T.Q8_0: StoredBlocks(lambda b: b[:, 2:], _one_scale),
    T.Q4_K: StoredBlocks(lambda b: spread(b[:, 16:], 32, 4), _six_bit_scales),
    T.Q5_K: StoredBlocks(lambda b: spread(b[:, 48:], 32, 4) | spread(b[:, 16:48], 32, 1) << 4, _six_bit_scales),
    T.Q6_K: StoredBlocks(_q6_k, lambda b: (small_scales(b), None)),
}
PACKINGS: dict[TensorType, Packing] = {
    T.Q4_0: Packing(4, 8, 32),
    T.Q4_1: Packing(4, 0, 32, has_min=True),
    T.Q5_0: Packing(5, 16, 32),
    T.Q5_1: Packing(5, 0, 32, has_min=True),
    T.Q8_0: Packing(8, 0, 32),
    T.Q4_K: Packing(4, 0, 32, has_min=True),
    T.Q5_K: Packing(5, 0, 32, has_min=True),
    T.Q6_K: Packing(6, 32, 16),
}
FLOAT8 = Packing(8, E4M3, 32)
