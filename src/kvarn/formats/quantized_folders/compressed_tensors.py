"""compressed-tensors: integers of 4 or 8 bits, packed or as bytes, and FP8, by the names of its formats.

pack-quantized    X.weight_packed (rows, columns * bits / 32) I32, offset by half the range; X.weight_shape;
                  X.weight_scale (rows, groups); X.weight_zero_point (rows * bits / 32, groups), X.weight_g_idx
int-quantized     X.weight I8 (naive-quantized too); X.weight_scale; X.weight_zero_point I8
float-quantized   X.weight F8_E4M3; X.weight_scale
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.formats.quantized_folders.fp8 import quantized_floats, scaled
from kvarn.formats.quantized_folders.gptq import group_order
from kvarn.formats.quantized_folders.matrix import (
    FLOATS,
    Folder,
    IntegerLayer,
    IntegerMatrix,
    Quantized,
    quantized,
    unpacked,
)

FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
METHOD = "compressed-tensors"


def find(folder: Folder) -> Quantized:
    """The matrices of a folder."""
    scheme = _scheme(folder)
    format_ = folder.config.get("format")
    if format_ == "pack-quantized":
        bits = scheme.get("num_bits")
        if bits not in (4, 8) or isinstance(bits, bool):
            raise folder.unsupported(f"num_bits is {short(bits)}; packed integers of 4 and 8 bits are known")
        return quantized(METHOD, [_packed(folder, stem, int(bits)) for stem in folder.stems(".weight_packed")])
    if scheme.get("type") == "float":
        structure = scheme.get("block_structure")
        block = tuple(structure) if isinstance(structure, list) and len(structure) == 2 else None
        names = [f"{stem}.weight" for stem in folder.stems(".weight_scale")]
        return quantized_floats(folder, {name: scaled(folder, name, block) for name in names})
    return quantized(METHOD, [_plain(folder, stem) for stem in folder.stems(".weight_scale")])


def _scheme(folder: Folder) -> Mapping[str, Any]:
    """The one scheme of the weights; several, or one of what is not known, are refused."""
    config = folder.config
    if config.get("format") not in FORMATS:
        raise folder.unsupported(f"format is {short(config.get('format'))}; known are {', '.join(FORMATS)}")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise folder.unsupported(f"sparsity_config is {short(sparsity)}; dense weights are known")
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [one.get("weights") for one in schemes if isinstance(one, Mapping)]
    if not weights or not all(isinstance(one, Mapping) for one in weights) or any(one != weights[0] for one in weights):
        raise folder.unsupported("config_groups has no scheme of weights, or several that differ; one is known")
    return dict(weights[0] or {})


def _packed(folder: Folder, stem: str, bits: int) -> IntegerLayer:
    per_word = 32 // bits
    rows, words = folder.expect(f"{stem}.weight_packed", ("I32",), (None, None)).shape
    folder.expect(f"{stem}.weight_shape", ("I64", "I32"), (2,))
    shape = tuple(int(n) for n in folder.read(f"{stem}.weight_shape"))
    if shape[0] != rows or not 0 < shape[1] <= words * per_word < shape[1] + per_word:
        raise folder.error(f"{stem}.weight_shape is {shape}, {stem}.weight_packed ({rows}, {words})")
    columns, zero = shape[1], f"{stem}.weight_zero_point"
    groups = _groups(folder, stem, rows, columns)
    order = group_order(folder, f"{stem}.weight_g_idx", columns, groups)
    has_zeros, half = zero in folder.tensors, 2 ** (bits - 1)
    if has_zeros:
        folder.expect(zero, ("I32",), (-(-rows // per_word), groups))

    zeros = np.zeros((rows, groups), np.int16)
    if has_zeros:  # packed along the rows, offset as the weights are
        zeros = unpacked(np.ascontiguousarray(folder.read(zero).T), bits).T[:rows] - np.int16(half)

    def read(some: slice) -> IntegerMatrix:
        quants = unpacked(folder.read(f"{stem}.weight_packed")[some], bits)[:, :columns] - np.int16(half)
        group_of = np.arange(columns) // (columns // groups) if order is None else order
        return IntegerMatrix(quants - zeros[some][:, group_of], _scales(folder, stem, rows)[some], order)

    parts = (f"{stem}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx"))
    return IntegerLayer(
        name=f"{stem}.weight",
        shape=(rows, columns),
        group=columns // groups if order is None else 0,
        low=-half - int(zeros.max()),
        high=half - 1 - int(zeros.min()),
        has_halves=folder.tensors[f"{stem}.weight_scale"].dtype == "F16",
        parts=tuple(part for part in parts if part in folder.tensors),
        read=read,
    )


def _plain(folder: Folder, stem: str) -> IntegerLayer:
    rows, columns = folder.expect(f"{stem}.weight", ("I8",), (None, None)).shape
    groups, zero = _groups(folder, stem, rows, columns), f"{stem}.weight_zero_point"
    has_zeros = zero in folder.tensors
    if has_zeros:
        folder.expect(zero, ("I8",), folder.tensors[f"{stem}.weight_scale"].shape)

    zeros = _spread(folder.read(zero).astype(np.int16) if has_zeros else np.zeros(1, np.int16), rows)

    def read(some: slice) -> IntegerMatrix:
        integers = folder.read(f"{stem}.weight")[some].astype(np.int16)
        spread = np.repeat(zeros[some], columns // zeros.shape[1], axis=1)
        return IntegerMatrix(integers - spread, _scales(folder, stem, rows)[some])

    return IntegerLayer(
        name=f"{stem}.weight",
        shape=(rows, columns),
        group=columns // groups,
        low=-128 - int(zeros.max()),
        high=127 - int(zeros.min()),
        has_halves=folder.tensors[f"{stem}.weight_scale"].dtype == "F16",
        parts=(f"{stem}.weight", f"{stem}.weight_scale", *((zero,) if has_zeros else ())),
        read=read,
    )


def _groups(folder: Folder, stem: str, rows: int, columns: int) -> int:
    """One scale, one for each row, or one for each group of a row."""
    name = f"{stem}.weight_scale"
    stored = folder.tensors.get(name)
    shape = () if stored is None else stored.shape
    groups = shape[1] if len(shape) == 2 else 1
    fits = shape in ((), (1,), (1, 1), (rows,)) or (len(shape) == 2 and shape[0] == rows)
    if stored is None or stored.dtype not in FLOATS or not fits or columns % groups:
        raise folder.error(f"tensor {name} is {shape or 'missing'}; {stem} has ({rows}, {columns}) weights")
    return groups


def _scales(folder: Folder, stem: str, rows: int) -> npt.NDArray[np.float32]:
    return _spread(folder.finite(f"{stem}.weight_scale"), rows)


def _spread(values: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """One value, one for each row, or (rows, groups), as (rows, groups)."""
    table = values if values.ndim == 2 else values.reshape(-1, 1)
    return np.broadcast_to(table, (rows, table.shape[1]))
