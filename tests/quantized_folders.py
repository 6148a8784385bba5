"""Writers of quantised tensors, from the descriptions of their formats: a matrix of integers and scales, packed.

Each returns the tensors to store beside a stem and the values that they stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float32]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs in the eight fields of a word, lowest bits first


def words(fields: npt.NDArray[Any], bits: int) -> npt.NDArray[np.int32]:
    """Fields along the last axis as words, lowest bits first; the last word is filled with zeros."""
    per_word = 32 // bits
    padded = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -fields.shape[-1] % per_word)])
    parts = padded.astype(np.uint32).reshape(*padded.shape[:-1], -1, per_word)
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(per_word):
        packed |= parts[..., place] << np.uint32(bits * place)
    return packed.view(np.int32)


def gptq(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group: int,
    bits: int = 4,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    offset: int = 1,
) -> tuple[Arrays, Floats]:
    """offset: by which stored zero points are too small."""
    outputs, inputs = shape
    groups, top = inputs // group, 2**bits
    zeros = np.full((groups, outputs), top // 2) if symmetric else rng.integers(1, top + 1, (groups, outputs))
    quants = rng.integers(0, top, shape)
    scales = _scales(rng, (groups, outputs), bits).astype(np.float16)
    group_of = np.arange(inputs) // group
    if shuffled:
        group_of = rng.permutation(group_of)
    values = scales.astype(np.float32)[group_of].T * (quants - zeros[group_of].T)
    stored = {"qweight": np.ascontiguousarray(words(quants, bits).T), "qzeros": words(zeros - offset, bits)}
    return stored | {"scales": scales, "g_idx": group_of.astype(np.int32)}, values.astype(np.float32)


def awq(
    rng: np.random.Generator, shape: tuple[int, int], group: int, *, symmetric: bool = False
) -> tuple[Arrays, Floats]:
    outputs, inputs = shape
    groups = inputs // group
    zeros = np.full((groups, outputs), 8) if symmetric else rng.integers(0, 16, (groups, outputs))
    quants = rng.integers(0, 16, (inputs, outputs))
    scales = _scales(rng, (groups, outputs), 4).astype(np.float16)
    spread = np.repeat(scales.astype(np.float32), group, axis=0), np.repeat(zeros, group, axis=0)
    stored = {"qweight": _awq_words(quants), "qzeros": _awq_words(zeros), "scales": scales}
    return stored, (spread[0] * (quants - spread[1])).T.astype(np.float32)


def _awq_words(fields: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    parts = fields.astype(np.uint32).reshape(len(fields), -1, 8)
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for place, output in enumerate(AWQ_ORDER):
        packed |= parts[..., output] << np.uint32(4 * place)
    return packed.view(np.int32)


def packed(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group: int,
    bits: int = 4,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
) -> tuple[Arrays, Floats]:
    """pack-quantized of compressed-tensors."""
    rows, columns = shape
    groups, half = columns // group, 2 ** (bits - 1)
    quants = rng.integers(-half, half, shape)
    zeros = np.zeros((rows, groups), np.int64) if symmetric else rng.integers(-half, half, (rows, groups))
    scales = _scales(rng, (rows, groups), bits).astype(np.float16)
    group_of = np.arange(columns) // group
    if shuffled:
        group_of = rng.permutation(group_of)
    values = scales.astype(np.float32)[:, group_of] * (quants - zeros[:, group_of])
    stored: Arrays = {"weight_packed": words(quants + half, bits), "weight_scale": scales}
    stored["weight_shape"] = np.array(shape, np.int64)
    if not symmetric:
        stored["weight_zero_point"] = np.ascontiguousarray(words((zeros + half).T, bits).T)
    if shuffled:
        stored["weight_g_idx"] = group_of.astype(np.int32)
    return stored, values.astype(np.float32)


def integers(rng: np.random.Generator, shape: tuple[int, int], *, per_row: bool = True) -> tuple[Arrays, Floats]:
    """int-quantized of compressed-tensors: one scale for each row, or one for all."""
    quants = rng.integers(-128, 128, shape, np.int8)
    scales = _scales(rng, (shape[0], 1) if per_row else (1,), 8).astype(np.float16)
    return {"weight": quants, "weight_scale": scales}, quants * scales.astype(np.float32)


def fp8(
    rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], name: str = "weight_scale"
) -> tuple[Arrays, Floats]:
    """Codes of E4M3 in bytes, and a scale for each block of rows and columns."""
    import torch

    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    codes = rng.integers(0, 127, shape, np.uint8) | rng.choice(np.array([0, 128], np.uint8), shape)  # 127 is none
    scales = rng.uniform(0.5, 1.5, grid).astype(np.float32) * np.float32(0.002)
    decoded = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]
    return {"weight": codes, name: scales[0] if grid == (1, 1) else scales}, decoded * spread


def save(tensors: Arrays, path: Path) -> None:
    """Write a safetensors file; bytes are codes of E4M3, which NumPy has no type for."""
    import torch
    from safetensors.torch import save_file

    found = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}
    coded = {name: one.view(torch.float8_e4m3fn) for name, one in found.items() if one.dtype is torch.uint8}
    save_file(found | coded, path)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Floats:
    """Such that values are about 0.1."""
    return (rng.uniform(0.5, 1.5, shape) * 0.3 / 2**bits).astype(np.float32)
