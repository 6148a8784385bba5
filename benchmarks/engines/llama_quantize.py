"""llama.cpp's own quantiser through llama-cpp-python: what `llama-quantize` calls.

    python -m benchmarks.engines.llama_quantize SOURCE.gguf OUT.gguf Q4_K_M [--imatrix FILE] [--threads 2]

The imatrix is used for the matrices of the layers, those that llama-imatrix collects. Prints seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as c
import numpy as np

from kvarn.quantization.imatrix import read_imatrix
from kvarn.quantization.recipes import FILE_TYPES


def llama_quantize(source: Path, output: Path, mix: str, imatrix: Path | None = None, threads: int = 2) -> float:
    """Write a file; the seconds that took."""
    c.llama_backend_init()
    silent = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(silent, None)
    params = c.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, FILE_TYPES[mix]
    entries, kept = _imatrix_data(imatrix) if imatrix is not None else (None, [])
    if entries is not None:
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(c.llama_model_imatrix_data))
    started = time.perf_counter()
    failed = c.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(params))
    seconds = time.perf_counter() - started
    del kept
    if failed:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {mix}")
    return seconds


def _imatrix_data(path: Path) -> tuple[Any, list[Any]]:
    """An array that ends with a nameless entry, and what its pointers point to."""
    found = read_imatrix(path).entries
    arrays = {name: np.ascontiguousarray(entry.importance, np.float32) for name, entry in found.items()}
    arrays = {name: values for name, values in arrays.items() if name.startswith("blk.")}
    entries = (c.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, values) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries, [entries, arrays]


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantise with llama.cpp.")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("mix")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(f"{llama_quantize(args.source, args.output, args.mix, args.imatrix, args.threads):.3f}")


if __name__ == "__main__":
    main()
