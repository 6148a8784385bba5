"""Quantised matrices in the layout of the kernels. Knows bits and bytes; multiplies nothing.

A column of the product is a row of the matrix. Its values are taken 256 at a time, in eight groups of 32; word j of a
tile holds value j of every group, so that unpacking one group is a shift and a mask of the same 32 words:

    low    int32 (columns, tiles x 32)   bits 4i .. 4i+3 of word j: the low four bits of value 32i + j
    high   of types with 5 bits int8, with 6 int16: the bits above, 1 or 2 for each group
    8 bits int32 twice: bytes of groups 0 to 3 in low, of 4 to 7 in high
    scales int32 (tiles x words + 1, columns): the file's scales, some to a word; at the end the bits of 2^23

Integers are stored without their sign: value = scale x (integer - zero), or scale x integer - minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.torch.dequantize import bits_of, half_bytes, nibbles, scale_and_min_bits, spread
from kvarn.formats.weights import TensorType

TILE = 256
GROUPS = 8
TWO_23 = 0x4B000000
CHUNK_VALUES = 1 << 24  # temporaries stay small beside the result
HALF, HALF_AND_MIN, SIX_BITS, INT8 = range(4)  # as in kernels.py


@dataclass(frozen=True, slots=True)
class Packing:
    """How a type is packed: bits of a value, the integer that means 0, what its scales are."""

    bits: int
    zero: int
    scales: int
    quants: Callable[[Tensor], Tensor]  # (blocks, bytes) -> (blocks, values) uint8
    words: Callable[[Tensor], Tensor]  # (blocks, bytes) -> (blocks, some) uint8: the bytes of its scales


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """(columns, depth) values of one type."""

    type: TensorType
    shape: tuple[int, int]
    low: Tensor
    high: Tensor | None
    scales: Tensor

    @property
    def packing(self) -> Packing:
        return PACKINGS[self.type]

    @property
    def tiles(self) -> int:
        return -(-self.shape[1] // TILE)


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
    columns, depth = shape
    blocks = raw.view(columns, -1, type.block_bytes)
    step = max(1, CHUNK_VALUES // depth)
    chunks = [_pack_rows(blocks[begin : begin + step], PACKINGS[type]) for begin in range(0, columns, step)]
    low, high, scales = zip(*chunks, strict=True)
    planes = None if high[0] is None else torch.cat(high)
    return PackedMatrix(type, shape, torch.cat(low), planes, torch.cat(scales, dim=1))


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
    high = None if first.high is None or second.high is None else torch.cat([first.high, second.high])
    shape = (first.shape[0] + second.shape[0], first.shape[1])
    scales = torch.cat([first.scales, second.scales], dim=1)
    return PackedMatrix(first.type, shape, torch.cat([first.low, second.low]), high, scales)


def _type_name(part: PackedMatrix | Tensor) -> str:
    return "dense" if isinstance(part, Tensor) else part.type.name


def _pack_rows(blocks: Tensor, packing: Packing) -> tuple[Tensor, Tensor | None, Tensor]:
    """Some columns' blocks, (columns, blocks, bytes)."""
    columns, num_blocks, num_bytes = blocks.shape
    flat = blocks.reshape(-1, num_bytes)
    quants, words = (part(flat) for part in (packing.quants, packing.words))
    missing = -(num_blocks * quants.shape[1]) % TILE // quants.shape[1]  # blocks of zeros, whose scales are 0
    quants, words = (
        torch.nn.functional.pad(part.view(columns, num_blocks, -1), (0, 0, 0, missing)).view(columns, -1)
        for part in (quants, words)
    )
    groups = quants.view(columns, -1, GROUPS, TILE // GROUPS).int()
    if packing.bits == 8:
        low, high = (_fields(groups[:, :, half], 8) for half in (slice(4), slice(4, 8)))
        return low, high, _columns(words)
    if packing.bits == 4:
        return _fields(groups, 4), None, _columns(words)
    more = _fields(groups >> 4, packing.bits - 4)
    return _fields(groups & 15, 4), more.to(torch.int8 if packing.bits == 5 else torch.int16), _columns(words)


def _fields(groups: Tensor, bits: int) -> Tensor:
    """(columns, tiles, groups, 32) integers as (columns, tiles x 32) words."""
    words = torch.zeros_like(groups[:, :, 0])
    for index in range(groups.shape[2]):
        words |= groups[:, :, index] << bits * index
    return words.view(len(groups), -1)


def _columns(words: Tensor) -> Tensor:
    """Bytes of scales (columns, bytes) as (words + 1, columns)."""
    return torch.nn.functional.pad(words.contiguous().view(torch.int32).T, (0, 0, 0, 1), value=TWO_23).contiguous()


def _int8_scales(stored: Tensor) -> Tensor:
    return torch.nn.functional.pad(stored[:, 192:], (0, 2))


def _q6_k(stored: Tensor) -> Tensor:
    return spread(stored[:, :128], 64, 4) | spread(stored[:, 128:192], 32, 2) << 4


def _six_bit_scales(stored: Tensor) -> Tensor:
    return torch.cat([*scale_and_min_bits(stored), stored[:, :4]], dim=1)


PACKINGS: dict[TensorType, Packing] = {
    TensorType.Q4_0: Packing(4, 8, HALF, lambda b: nibbles(b[:, 2:]), lambda b: half_bytes(b, 0)),
    TensorType.Q4_1: Packing(4, 0, HALF_AND_MIN, lambda b: nibbles(b[:, 4:]), lambda b: b[:, :4]),
    TensorType.Q5_0: Packing(
        5, 16, HALF, lambda b: nibbles(b[:, 6:]) | bits_of(b[:, 2:6]) << 4, lambda b: half_bytes(b, 0)
    ),
    TensorType.Q5_1: Packing(
        5, 0, HALF_AND_MIN, lambda b: nibbles(b[:, 8:]) | bits_of(b[:, 4:8]) << 4, lambda b: b[:, :4]
    ),
    TensorType.Q8_0: Packing(8, 128, HALF, lambda b: b[:, 2:] ^ 128, lambda b: half_bytes(b, 0)),
    TensorType.Q4_K: Packing(4, 0, SIX_BITS, lambda b: spread(b[:, 16:], 32, 4), _six_bit_scales),
    TensorType.Q5_K: Packing(
        5, 0, SIX_BITS, lambda b: spread(b[:, 48:], 32, 4) | spread(b[:, 16:48], 32, 1) << 4, _six_bit_scales
    ),
    TensorType.Q6_K: Packing(6, 32, INT8, _q6_k, _int8_scales),
}
