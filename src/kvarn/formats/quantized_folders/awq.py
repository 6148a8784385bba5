"""AWQ in the packing of its "gemm" kernels: int32 words of eight neighbours along the outputs, the even ones first.

X.qweight (inputs, outputs / 8)   X.qzeros (groups, outputs / 8)   X.scales (groups, outputs)
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

BITS = 4
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word the eight neighbours are


def find(folder: Folder) -> Quantized:
    """The matrices of a folder."""
    bits = folder.config.get("bits", folder.config.get("w_bit"))
    version = str(folder.config.get("version", "gemm")).lower()
    if bits != BITS or version != "gemm":
        raise folder.unsupported(f"bits is {short(bits)} and version {short(version)}; AWQ of 4 bits, gemm, is known")
    return quantized("AWQ", [_layer(folder, stem) for stem in folder.stems(".qweight")])


def _layer(folder: Folder, stem: str) -> IntegerLayer:
    inputs, words = folder.expect(f"{stem}.qweight", ("I32",), (None, None)).shape
    scales = folder.expect(f"{stem}.scales", FLOATS, (None, words * 8))
    groups = scales.shape[0]
    if inputs % groups:
        raise folder.error(f"{stem}: {groups} groups do not divide {inputs} inputs")
    folder.expect(f"{stem}.qzeros", ("I32",), (groups, words))

    zeros = _neighbours(folder.read(f"{stem}.qzeros"))

    def read(rows: slice) -> IntegerMatrix:
        first = rows.start // 8  # whole words, of which the rows are a part
        quants = _neighbours(folder.read(f"{stem}.qweight")[:, first : -(-rows.stop // 8)])
        wanted = quants[:, rows.start - 8 * first : rows.stop - 8 * first]
        integers = wanted - np.repeat(zeros[:, rows], inputs // groups, axis=0)
        return IntegerMatrix(np.ascontiguousarray(integers.T), folder.finite(f"{stem}.scales")[:, rows].T)

    return IntegerLayer(
        name=f"{stem}.weight",
        shape=(words * 8, inputs),
        group=inputs // groups,
        low=-int(zeros.max()),
        high=2**BITS - 1 - int(zeros.min()),
        has_halves=scales.dtype == "F16",
        parts=tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")),
        read=read,
    )


def _neighbours(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int16]:
    """The fields of words in the order of the outputs."""
    fields = unpacked(words, BITS).reshape(*words.shape, 8)
    return fields[..., PLACES].reshape(words.shape[0], -1)
