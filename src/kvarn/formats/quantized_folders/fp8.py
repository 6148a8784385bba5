"""FP8 (E4M3): X.weight in bytes, and scales: one, one for each row, or one for each block of weight_block_size.

    X.weight_scale or X.weight_scale_inv, (), (1,), (rows, 1), (rows,) or (row blocks, column blocks)
X.input_scale and X.activation_scale are for kernels that quantise their inputs as well: no value changes by them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvarn.checks import short
from kvarn.formats.quantized_folders.matrix import (
    BLOCK,
    FLOATS,
    Bytes,
    Floats,
    Folder,
    Quantized,
    QuantizedTensor,
    floats,
)
from kvarn.formats.weights import Float8Matrix, TensorInfo, TensorType

SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = (".input_scale", ".activation_scale")


def find(folder: Folder) -> Quantized:
    """The matrices of a folder."""
    block = folder.config.get("weight_block_size")
    sizes = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and 0 < n < 2**20 for n in block)
    if block is not None and not sizes:
        raise folder.error(f"weight_block_size is {short(block)}; expected two numbers")
    matrices = [f"{stem}.weight" for stem in folder.stems(".weight")]
    stored = [name for name in matrices if folder.tensors[name].dtype == "F8_E4M3"]
    return quantized_floats(folder, {name: scaled(folder, name, tuple(block) if block else None) for name in stored})


def quantized_floats(folder: Folder, tensors: dict[str, QuantizedTensor]) -> Quantized:
    """FP8 matrices, which CPUs run as float16: with a note, and without the scales of inputs."""
    unread = frozenset(name for name in folder.tensors if name.endswith(INPUT_SCALES))
    notes = (
        ("FP8 weights are run as F16: values are rounded to 11 bits (on an NVIDIA GPU: as they are, scales to 8)",)
        if tensors
        else ()
    )
    return Quantized(tensors, unread, notes)


def scaled(folder: Folder, name: str, block: tuple[int, int] | None) -> QuantizedTensor:
    """One matrix with its scales."""
    stem = name.removesuffix(".weight")
    rows, columns = folder.expect(name, ("F8_E4M3",), (None, None)).shape
    present = [f"{stem}.{suffix}" for suffix in SCALES if f"{stem}.{suffix}" in folder.tensors]
    if len(present) != 1:
        raise folder.error(f"tensor {name} needs one of {' and '.join(f'{stem}.{suffix}' for suffix in SCALES)}")
    (scale,) = present
    shape = folder.tensors[scale].shape
    allowed = {(), (1,), (1, 1), (rows,), (rows, 1)}
    if block is not None:
        allowed = {(-(-rows // block[0]), -(-columns // block[1]))}
    if shape not in allowed or folder.tensors[scale].dtype not in FLOATS:
        raise folder.error(f"tensor {scale} is {folder.tensors[scale]}; {name} is ({rows}, {columns})")

    def dense(some: slice) -> Floats:
        values: Floats = DECODED[folder.read(name)[some]]
        scales = folder.finite(scale)
        if block is None:
            return values * (scales.reshape(-1, 1)[some] if scales.size > 1 else scales.reshape(1, 1))
        of_rows: Floats = scales[np.arange(some.start, some.stop) // block[0]]
        spread: Floats = np.repeat(of_rows, block[1], axis=1)[:, :columns]
        return values * spread

    def stored() -> tuple[Bytes, Floats]:
        scales = folder.finite(scale)
        if block is None:
            return folder.read(name), scales.reshape(-1, 1)
        of_rows = scales[np.arange(rows) // block[0]]
        return folder.read(name), of_rows[:, np.arange(0, columns, BLOCK) // block[1]]

    tensor = floats(TensorInfo(name, TensorType.F16, (rows, columns)), (name, scale), dense)
    has_blocks = columns % BLOCK == 0 and (block is None or block[1] % BLOCK == 0)
    return replace(tensor, float8=Float8Matrix(stored)) if has_blocks else tensor


def _e4m3(code: int) -> float:
    """Four bits of exponent, three of mantissa, no infinity; 0x7F and 0xFF are not numbers."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


DECODED = np.array([_e4m3(code) for code in range(256)], np.float32)
