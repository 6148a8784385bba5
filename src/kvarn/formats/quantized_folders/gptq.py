"""GPTQ: int32 words of 4 or 8 bits along the inputs, zero points along the outputs, a group for each input.

X.qweight (inputs * bits / 32, outputs)   X.qzeros (groups, outputs * bits / 32), in "gptq" one less than they are
X.scales  (groups, outputs)               X.g_idx  (inputs), in any order where desc_act; may be missing
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.formats.quantized_folders.matrix import (
    FLOATS,
    Folder,
    IntegerLayer,
    IntegerMatrix,
    Quantized,
    quantized,
    unpacked,
)

OFFSETS = {"gptq": 1, "gptq_v2": 0}  # of the zero points


def find(folder: Folder) -> Quantized:
    """The matrices of a folder."""
    bits, version = folder.config.get("bits"), folder.config.get("checkpoint_format") or "gptq"
    if bits not in (4, 8) or isinstance(bits, bool):
        raise folder.unsupported(f"bits is {short(bits)}; GPTQ weights of 4 and 8 bits are known")
    if version not in OFFSETS:
        raise folder.unsupported(f"checkpoint_format is {short(version)}; {', '.join(OFFSETS)} are known")
    layers = [_layer(folder, stem, int(bits), OFFSETS[version]) for stem in folder.stems(".qweight")]
    return quantized("GPTQ", layers)


def _layer(folder: Folder, stem: str, bits: int, offset: int) -> IntegerLayer:
    per_word = 32 // bits
    words, outputs = folder.expect(f"{stem}.qweight", ("I32",), (None, None)).shape
    scales = folder.expect(f"{stem}.scales", FLOATS, (None, outputs))
    inputs, groups = words * per_word, scales.shape[0]
    if outputs % per_word or inputs % groups:
        raise folder.error(f"{stem}: {groups} groups do not divide {inputs} inputs, or {outputs} outputs are no words")
    folder.expect(f"{stem}.qzeros", ("I32",), (groups, outputs // per_word))
    order = group_order(folder, f"{stem}.g_idx", inputs, groups)

    zeros = unpacked(folder.read(f"{stem}.qzeros"), bits) + np.int16(offset)

    def read(rows: slice) -> IntegerMatrix:
        quants = unpacked(np.ascontiguousarray(folder.read(f"{stem}.qweight")[:, rows].T), bits)  # (outputs, inputs)
        group_of = np.arange(inputs) // (inputs // groups) if order is None else order
        integers = quants - zeros[:, rows].T[:, group_of]
        return IntegerMatrix(integers, folder.finite(f"{stem}.scales")[:, rows].T, order)

    parts = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    return IntegerLayer(
        name=f"{stem}.weight",
        shape=(outputs, inputs),
        group=inputs // groups if order is None else 0,
        low=-int(zeros.max()),
        high=2**bits - 1 - int(zeros.min()),
        has_halves=scales.dtype == "F16",
        parts=tuple(part for part in parts if part in folder.tensors),
        read=read,
    )


def group_order(folder: Folder, name: str, inputs: int, groups: int) -> npt.NDArray[np.int64] | None:
    """The group of each input; None where the groups follow each other."""
    if name not in folder.tensors:
        return None
    folder.expect(name, ("I32",), (inputs,))
    order: npt.NDArray[np.int64] = folder.read(name).astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        raise folder.error(f"tensor {name} names groups beyond the {groups} there are")
    return None if np.array_equal(order, np.arange(inputs) // (inputs // groups)) else order
