"""Blocks as integers and scales, and such blocks as the types there are kernels for: the same integers, other packing.

value = scale * factor * integer, one scale for a block, one factor for each group of its values. Where a function says
exact, a stored scale that float16 holds (half of, an eighth of) gives bit for bit the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.block_quants import IQ4_NL_VALUES, Bytes, Floats, pack_nibbles
from kvarn.formats.k_quants import gather, pack_scales_and_mins

Integers = npt.NDArray[np.int8]
_IQ4_NL_CODES = np.zeros(256, np.uint8)  # by the byte of a level
_IQ4_NL_CODES[np.array(IQ4_NL_VALUES, np.int8).view(np.uint8)] = np.arange(16)


@dataclass(frozen=True, slots=True)
class IntegerBlocks:
    """scale (blocks, 1), factors (blocks, groups), integers (blocks, values)."""

    scale: Floats
    factors: Floats
    integers: Integers

    def decoded(self) -> Floats:
        """The values: exact, because the products of the scales' and integers' bits fit in a float32."""
        grouped = self.integers.reshape(*self.factors.shape, -1).astype(np.float32)
        return ((self.scale * self.factors)[..., None] * grouped).reshape(len(self.integers), -1)

    def group_size(self) -> int:
        return int(self.integers.shape[1]) // int(self.factors.shape[1])


def as_q2_k(blocks: IntegerBlocks) -> Bytes:
    """Exact: integers from -1 to 1, one factor of 1."""
    ones = np.full((len(blocks.integers), 16), 1 | 1 << 4, np.uint8)
    quants = gather((blocks.integers + 1).view(np.uint8), 32, 2)
    return np.hstack([ones, quants, _half(blocks.scale), _half(blocks.scale)])


def as_q5_k(blocks: IntegerBlocks) -> Bytes:
    """Exact: integers from -16 to 15, factors of up to 63 for groups of 32; the minimum of a group is 16 steps."""
    quants = (blocks.integers + 16).view(np.uint8)
    factors = blocks.factors.astype(np.uint8)
    packed = pack_scales_and_mins(factors, factors)
    halves = _half(blocks.scale), _half(blocks.scale * np.float32(16))
    return np.hstack([*halves, packed, gather(quants >> 4, 32, 1), gather(quants & 15, 32, 4)])


def as_q6_k(blocks: IntegerBlocks) -> Bytes:
    """Exact: integers from -32 to 31, factors of up to 127 for groups of 16 or 32."""
    quants = (blocks.integers + 32).view(np.uint8)
    factors = np.repeat(blocks.factors.astype(np.uint8), blocks.group_size() // 16, axis=1)
    return np.hstack([gather(quants & 15, 64, 4), gather(quants >> 4, 32, 2), factors, _half(blocks.scale)])


def as_iq4_nl(blocks: IntegerBlocks) -> Bytes:
    """Integers that are levels of this type, in groups of 32; scale times factor is rounded to float16."""
    codes = _IQ4_NL_CODES[blocks.integers.reshape(-1, 32).view(np.uint8)]
    return np.hstack([_half((blocks.scale * blocks.factors).reshape(-1, 1)), pack_nibbles(codes)])


def as_q8_0(blocks: IntegerBlocks) -> Bytes:
    """Groups of 32; scale times factor is rounded to float16."""
    scales = (blocks.scale * blocks.factors).reshape(-1, 1)
    return np.hstack([_half(scales), blocks.integers.reshape(-1, 32).view(np.uint8)])


def pairs_as_q8_0(blocks: IntegerBlocks, steps: tuple[float, ...]) -> Bytes:
    """Two groups of 16; the scale is a part (1 / step) of that of the larger factor, rounded to float16.

    With a whole step that group's integers are exact, and the other's fall between: the step of least error is taken.
    """
    pairs = blocks.factors.reshape(-1, 2)
    largest = pairs.max(axis=1, keepdims=True)
    ratios = np.repeat(pairs / np.where(largest > 0, largest, 1), 16, axis=1)
    wanted = blocks.integers.reshape(-1, 32) * ratios
    tried = [np.rint(wanted * step) for step in steps]
    errors = [np.square(one / step - wanted).sum(axis=1) for one, step in zip(tried, steps, strict=True)]
    best = np.argmin(errors, axis=0)[:, None]
    quants = np.choose(best, tried).astype(np.int8)
    scale = np.repeat(blocks.scale, blocks.factors.shape[1] // 2, axis=0)
    scales = scale * largest / np.array(steps, np.float32)[best]
    return np.hstack([_half(scales), quants.view(np.uint8)])


def _half(column: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(column.astype("<f2"))
    if np.any(np.isinf(halves) & np.isfinite(column)):
        raise FormatError("a block has a scale that is too large for float16; use a file of another type")
    return halves.view(np.uint8)
