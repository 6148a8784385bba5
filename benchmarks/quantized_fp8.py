"""What rounding to FP8 costs a model: its layers' matrices with a scale for the tensor or for each row, run as F16; and
with scales and values rounded to bfloat16, as the kernels of GPUs make them of the codes.

    python -m benchmarks.quantized_fp8 smollm2 --work FOLDER

Writes benchmarks/results/quantized-fp8-MODEL.json: divergence from the source, Q8_0 beside it. The texts are those of
benchmarks.quantized.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.float_source import SOURCES, float_source
from tests.parity.test_size_beside_mix import texts
from tests.results import write_result

import kvarn
from benchmarks.quantized import JUDGED
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.quantized_folders.fp8 import DECODED
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorType
from kvarn.quantization.fp8.scheme import FP8Scheme, encode, scales_of

SCHEMES = (FP8Scheme.FP8_TENSOR, FP8Scheme.FP8_ROW)


def main() -> None:
    """Write the files that are missing, and judge all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(SOURCES))
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    source = float_source(args.model)
    files = {
        scheme.name: _rounded(source, args.work / f"{args.model}-{scheme.name}.gguf", scheme) for scheme in SCHEMES
    }
    row = FP8Scheme.FP8_ROW
    files["FP8_ROW, GPU"] = _rounded(source, args.work / f"{args.model}-FP8_ROW-gpu.gguf", row, TensorType.BF16)
    files["Q8_0"] = args.work / f"{args.model}-Q8_0-rtn.gguf"
    if not files["Q8_0"].exists():
        kvarn.quantize(source, "Q8_0", files["Q8_0"], options=kvarn.QuantizeOptions(method="rtn"))
    held_out = texts(args.work, is_long=True)[1]
    reports = evaluate_all(list(files.values()), text=held_out, against=source, options=JUDGED)
    figures = {name: report.as_dict() for name, report in zip(("source", *files), reports, strict=True)}
    command = f"python -m benchmarks.quantized_fp8 {args.model}"
    write_result(f"quantized-fp8-{args.model}", figures, command=command)
    print(json.dumps(figures))


def _rounded(source: Path, path: Path, scheme: FP8Scheme, type: TensorType = TensorType.F16) -> Path:
    """The source with the matrices of its layers as FP8 has them."""
    if path.exists():
        return path
    file = GGUFFile(source)
    tensors = {}
    for name, info in file.tensors.items():
        values = file.array(name)
        if name.startswith("blk.") and len(info.shape) == 2:
            values = _fp8(values, scheme, type)
            tensors[name] = Stored.quantized(values, type)
        else:
            tensors[name] = Stored.quantized(values, TensorType.F16 if len(info.shape) == 2 else TensorType.F32)
    write_gguf(path, file.stored_metadata(), tensors)
    return path


def _fp8(values: npt.NDArray[np.float32], scheme: FP8Scheme, type: TensorType) -> npt.NDArray[np.float32]:
    scales = scheme.spread(scales_of(scheme.peaks(values)))
    codes = encode(values / scales)
    if type is TensorType.BF16:
        shape = np.shape(scales)
        scales = dequantize(quantize(np.reshape(scales, (1, -1)), type), type, shape)
    found: npt.NDArray[np.float32] = DECODED[codes] * scales
    return found


if __name__ == "__main__":
    main()
