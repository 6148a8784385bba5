"""ggml's own quantiser, called in the library of llama-cpp-python: the oracle of our encoders.

LLAMA_CPP_LIB_PATH may name the folder of another build of the library, as for llama-cpp-python itself.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import TensorType
from kvarn.quantization.storage_only.types import StorageOnlyType, WrittenType

T, S = TensorType, StorageOnlyType
Float32 = npt.NDArray[np.float32]

# llama.cpp's weight of an error: importance * sqrt(sigma2 + x^2), sigma2 = so many times the mean square of
# the super-block (of a block for IQ4_NL), or of the row; Q6_K and MXFP4 have the bare importance.
SIGMA_FACTORS: dict[WrittenType, float] = {
    **{T.Q2_K: 1.0, T.Q3_K: 2.0, T.Q4_K: 2.0, T.Q5_K: 2.0, T.IQ4_NL: 2.0},
    S.IQ4_XS: 2.0,
}


def open_ggml() -> ctypes.CDLL | None:
    """The library with ggml_quantize_chunk; None where there is none."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        return None
    folder = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(package.origin).parent / "lib"
    found = sorted(Path(folder).glob("libggml-base.*"))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library


def ggml_encode(ggml: ctypes.CDLL, x: Float32, type: WrittenType, importance: Float32 | None) -> npt.NDArray[np.uint8]:
    """Rows of values as ggml quantises them; importance: one number for each column."""
    out = np.empty(type.num_bytes(x.size), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    ggml.ggml_quantize_chunk(type.id, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
    return out


def error_weight(x: Float32, type: WrittenType, importance: Float32) -> Float32:
    """How much llama.cpp's search lets an error of each value count."""
    if type in (T.Q6_K, S.MXFP4):
        return np.broadcast_to(importance, x.shape)
    block = type.block_values if type in SIGMA_FACTORS else x.shape[1]
    means = np.square(x).reshape(len(x), -1, block).mean(axis=2).repeat(block, axis=1)
    weight: Float32 = importance * np.sqrt(SIGMA_FACTORS.get(type, 1.0) * means + x**2)
    return weight
