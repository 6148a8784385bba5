"""What the kernel tests share: random stored matrices, the tolerance family f32, exact references in double."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.backends.native._native import kernels
from kvarn.formats.weights import TensorType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

TABLES: list[str] = [*kernels.tables(), *kernels.emulated_tables()]
TYPES = list(TensorType)
QUANTIZED = [type_ for type_ in TensorType if type_.block_values > 1]
F32_TOLERANCE = 2e-6  # of the sum of the terms' magnitudes; csrc/kernels/table.h

# Where the f16 scales of a block lie.
HALF_FIELDS = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
}


def set_halves(stored: Bytes, type_: TensorType, values: npt.NDArray[np.float16]) -> None:
    """Write one f16 per block into every scale field of stored (blocks, block bytes)."""
    for at in HALF_FIELDS[type_]:
        stored[:, at : at + 2] = np.broadcast_to(values, len(stored)).astype("<f2").view(np.uint8).reshape(-1, 2)


def random_matrix(type_: TensorType, rows: int, columns: int, seed: int = 0) -> Bytes:
    """Stored bytes with every bit of the quants random and small normal scales."""
    rng = np.random.default_rng(seed)
    if type_.block_values == 1:
        values = rng.standard_normal(rows * columns).astype(np.float32)
        if type_ is TensorType.BF16:
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype("<f2" if type_ is TensorType.F16 else "<f4").view(np.uint8)
    stored = rng.integers(0, 256, (rows * columns // type_.block_values, type_.block_bytes), dtype=np.uint8)
    set_halves(stored, type_, (rng.standard_normal(len(stored)) * 0.01).astype(np.float16))
    return stored.reshape(-1)


def random_activations(tokens: int, columns: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


def seen_by_kernel(table: str, type_: TensorType, x: Floats) -> Doubles:
    """The activations as the matrix kernel of type_ multiplies them: floats only where the weights are."""
    if type_.block_values == 1:
        return x.astype(np.float64)
    if rounds(table):
        return np.stack([rounded_by_kernel(table, row) for row in x]).astype(np.float64)
    rows = []
    for row in x:
        quants, scales, _, _ = kernels.quantize_row(table, row)
        rows.append((quants.reshape(-1, 32).astype(np.float64) * scales[:, None]).ravel())
    return np.stack(rows)


def weights_of_kernel(table: str, type_: TensorType, weights: Floats) -> Doubles:
    """Dequantised weights as the matrix kernel of type_ multiplies them: as they are, or rounded to bf16."""
    return (rounded(weights) if rounds(table) and type_.block_values > 1 else weights).astype(np.float64)


def rounds(table: str) -> bool:
    """Whether products with quantised types round weights and activations to bf16."""
    return kernels.round_row(table, np.zeros(32, np.float32)) is not None


def rounded_by_kernel(table: str, x: Floats) -> Floats:
    """What the table makes of a row, which has the even columns of each block first."""
    blocks = floats_of_bf16(kernels.round_row(table, x)).reshape(-1, 2, 16)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1)


def floats_of_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Floats) -> Floats:
    """Finite numbers to bf16, to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return floats_of_bf16(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))
