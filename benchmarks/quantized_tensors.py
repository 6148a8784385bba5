"""Our encoders beside ggml's (`ggml_quantize_chunk` of llama-cpp-python): blocks, and the matrices of a real model.

    python -m benchmarks.quantized_tensors blocks                                      every type, random values
    python -m benchmarks.quantized_tensors errors smollm2 --work FOLDER [--mix Q4_0]   weighted error, one imatrix
    python -m benchmarks.quantized_tensors bytes qwen-coder [--mix Q4_K_M]             bytes, without an imatrix

Writes quantized-blocks.json, quantized-errors-MODEL.json and quantized-bytes-MODEL.json to benchmarks/results/. An
error counts as llama.cpp's search lets it count. `blocks`: 256 x 2,048 values; errors with importance, as shares of
ggml's, and processor time without, of one thread, the least of rounds by turns. `errors`: the types of a mix, and the
imatrix of `benchmarks.quantized` in the folder. `bytes`: on x86, where no compiler fuses multiply-adds in ggml-base.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.float_source import SOURCES, float_source
from tests.ggml_library import error_weight, ggml_encode, open_ggml
from tests.results import write_result

from benchmarks.quantized import QuantizedFiles
from kvarn.backends.native import _native
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.quantization.allocation.candidates import BLOCK_TYPES
from kvarn.quantization.blocks import requantized
from kvarn.quantization.imatrix import ImportanceMatrix, read_imatrix
from kvarn.quantization.plan import plan_mix
from kvarn.quantization.report import TensorChange
from kvarn.quantization.source import ModelSource, open_source

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
SLICE_VALUES = 1 << 21  # of a matrix at one time
BLOCKS_SHAPE, ROUNDS = (256, 2048), 9


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("blocks", "errors", "bytes"))
    parser.add_argument("model", nargs="?", choices=tuple(SOURCES), default="qwen-coder")
    parser.add_argument("--work", type=Path, help="holds the imatrix, or gets it")
    parser.add_argument("--mix", action="append")
    args = parser.parse_args()
    ggml = open_ggml()
    if ggml is None or (args.what == "errors" and args.work is None):
        parser.error("needs llama-cpp-python, and for errors a folder (--work)")
    if args.what == "blocks":
        figures = blocks_of(ggml)
        write_result("quantized-blocks", figures, command="python -m benchmarks.quantized_tensors blocks")
        print(json.dumps(figures))
        return
    matrix = read_imatrix(QuantizedFiles(args.model, args.work).matrix()) if args.what == "errors" else None
    with closing(open_source(float_source(args.model))) as source:
        compare = errors_of if args.what == "errors" else bytes_of
        figures = {mix: compare(source, mix, matrix, ggml) for mix in args.mix or ["Q4_K_M", "Q4_0"]}
    command = f"python -m benchmarks.quantized_tensors {args.what} {args.model}"
    write_result(f"quantized-{args.what}-{args.model}", figures, command=command)
    print(json.dumps(figures))


def blocks_of(ggml: ctypes.CDLL) -> dict[str, Any]:
    """Every block type: our share of ggml's weighted error, and both processor times."""
    rng, found = np.random.default_rng(11), dict[str, dict[str, float]]()
    normal = (0.02 * rng.standard_normal(BLOCKS_SHAPE)).astype(np.float32)
    values = {"normal": normal, "heavy_tails": normal * rng.exponential(1, BLOCKS_SHAPE).astype(np.float32)}
    importance = (rng.exponential(1, BLOCKS_SHAPE[1]) ** 2 + 0.01).astype(np.float32)
    info = TensorInfo("blocks", TensorType.F32, BLOCKS_SHAPE)
    for type in BLOCK_TYPES:
        figures = found[type.name] = {}
        for kind, x in values.items() if type is not TensorType.Q8_0 else ():
            weight = error_weight(x, type, importance)
            made = _encoded(_raw(x), info, type, importance), ggml_encode(ggml, x, type, importance)
            ours, theirs = (_error(weight, x, data, type) for data in made)
            figures[kind] = ours / theirs
        runs = [_cpu_seconds(normal, info, type, ggml) for _ in range(ROUNDS)]
        figures["ours_ms"], figures["ggml_ms"] = (1e3 * min(seconds) for seconds in zip(*runs, strict=True))
        print(type.name, figures, flush=True)
    return found


def _cpu_seconds(x: Float32, info: TensorInfo, type: TensorType, ggml: ctypes.CDLL) -> tuple[float, float]:
    raw, started = _raw(x), time.process_time()
    _encoded(raw, info, type, None)
    between = time.process_time()
    ggml_encode(ggml, x, type, None)
    return between - started, time.process_time() - between


def errors_of(source: ModelSource, mix: str, matrix: ImportanceMatrix | None, ggml: ctypes.CDLL) -> dict[str, Any]:
    """Our weighted error over ggml's, by type: of each matrix whose errors the imatrix weighs."""
    assert matrix is not None
    found: dict[str, dict[str, float]] = {}
    for change in plan_mix(source, mix, matrix, pure=False).changes:
        if not change.is_weighted or not isinstance(change.type, TensorType):
            continue
        importance = matrix.entries[change.source.name].importance
        ours, theirs = _errors(source.weights, change.source, change.type, importance, ggml)
        found.setdefault(change.type.name, {})[change.source.name] = ours / theirs
    told = {type: _ratios(ratios) for type, ratios in found.items()}
    print(mix, told, flush=True)
    return told


def bytes_of(source: ModelSource, mix: str, _: ImportanceMatrix | None, ggml: ctypes.CDLL) -> dict[str, Any]:
    """How many matrices are byte for byte ggml's, and the processor time of both conversions."""
    total, equal, differing = Counter[str](), Counter[str](), []
    seconds = {"ours_cpu_s": 0.0, "ggml_cpu_s": 0.0}
    for change in _rounded(source, mix):
        assert isinstance(change.type, TensorType)
        is_equal = True
        for values, raw, info in _slices(source.weights, change.source):
            started = time.process_time()
            ours = _encoded(raw, info, change.type, None)
            between = time.process_time()
            theirs = ggml_encode(ggml, values, change.type, None)
            seconds["ours_cpu_s"] += between - started
            seconds["ggml_cpu_s"] += time.process_time() - between
            is_equal = is_equal and np.array_equal(ours, theirs)
        total[change.type.name] += 1
        equal[change.type.name] += is_equal
        differing += [] if is_equal else [change.source.name]
    told = {"matrices": dict(total), "equal": dict(equal), "differing": differing} | seconds
    print(mix, told, flush=True)
    return told


def _rounded(source: ModelSource, mix: str) -> Iterator[TensorChange]:
    for change in plan_mix(source, mix, None, pure=False).changes:
        if not change.is_copy:
            yield change


def _errors(
    weights: WeightSource, info: TensorInfo, type: TensorType, importance: Float32, ggml: ctypes.CDLL
) -> tuple[float, float]:
    ours = theirs = 0.0
    for values, raw, part in _slices(weights, info):
        weight = error_weight(values, type, importance)
        made = _encoded(raw, part, type, importance), ggml_encode(ggml, values, type, importance)
        errors = [_error(weight, values, data, type) for data in made]
        ours, theirs = ours + errors[0], theirs + errors[1]
    return ours, theirs


def _error(weight: Float32, values: Float32, data: Bytes, type: TensorType) -> float:
    return float((weight * np.square(dequantize(data, type, values.shape) - values)).sum(dtype=np.float64))


def _raw(values: Float32) -> Bytes:
    return values.reshape(-1).view(np.uint8)


def _slices(weights: WeightSource, info: TensorInfo) -> Iterator[tuple[Float32, Bytes, TensorInfo]]:
    """Some rows at a time: values, bytes, and what they are as a tensor."""
    stored, columns = weights.raw(info.name).reshape(info.shape[0], -1), info.shape[-1]
    step = max(1, SLICE_VALUES // columns)
    for begin in range(0, len(stored), step):
        raw = np.ascontiguousarray(stored[begin : begin + step]).reshape(-1)
        shape = (len(stored[begin : begin + step]), columns)
        yield dequantize(raw, info.type, shape), raw, TensorInfo(info.name, info.type, shape)
    weights.release_pages((info.name,))


def _encoded(raw: Bytes, info: TensorInfo, type: TensorType, importance: Float32 | None) -> Bytes:
    return np.concatenate(list(requantized(raw, info, type, importance, _native.ThreadTeam(1))))


def _ratios(ratios: dict[str, float]) -> dict[str, Any]:
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "matrices": len(ratios),
        "larger_than_ggml": sum(ratio > 1 for ratio in ratios.values()),
        "least": min(ratios.values()),
        "median": statistics.median(ratios.values()),
        "largest": ratios[worst],
        "largest_of": worst,
    }


if __name__ == "__main__":
    main()
