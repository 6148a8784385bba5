"""Speed of the matrix kernels on one thread: GOP/s for 512 tokens, GB/s of packed weights for one token.

    python benchmarks/kernels.py [--table avx2] [--types Q4_0,Q6_K] [--megabytes 96] [--seconds 0.3]

Beside each figure its share of what this machine reached in a probe: 8-bit dot products with the table's instructions,
and plain reading. The one-token matrix is larger than most caches (--megabytes); the 512-token one stays in them. Each
figure is the best of the runs that fit in --seconds, quantising the activations included. Prints a table and one JSON
line, last. `python -m benchmarks.quiet python benchmarks/kernels.py` keeps other processes out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from kvarn.backends.native._native import kernels
from kvarn.bench.limits import measure_limits
from kvarn.bench.report import describe_machine
from kvarn.formats.quants import quantize
from kvarn.formats.weights import TensorType

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
COLUMNS = 2048
PREFILL_ROWS, PREFILL_TOKENS = 512, 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the matrix kernels on one thread.")
    parser.add_argument("--table", default="", help="kernel table; default: the best of this CPU")
    parser.add_argument("--types", default="", help="comma-separated tensor types; default: all")
    parser.add_argument("--megabytes", type=int, default=96, help="size of the one-token matrix")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each figure")
    args = parser.parse_args()
    types = [TensorType[name] for name in args.types.split(",")] if args.types else list(TensorType)
    table = args.table or kernels.tables()[0]
    limits = measure_limits(1, table)
    assert limits is not None  # the core is there: we have its kernels
    print(f"table {table}, limits of one thread: {limits.dot_gops} GOP/s, {limits.read_gbps} GB/s")
    print(f"{'type':8}{'prefill GOP/s':>16}{'of limit':>10}{'decode GB/s':>14}{'of limit':>10}")
    figures = {}
    for type_ in types:
        found = figures[type_.name] = measure(table, type_, args.megabytes << 20, args.seconds)
        found["of_read"] = round(found["gbps"] / limits.read_gbps, 3)
        if type_ not in FLOATS:
            found["of_dot"] = round(found["gops"] / limits.dot_gops, 3)
        print(line(type_.name, found), flush=True)
    report = {"table": table, "columns": COLUMNS, "tokens": PREFILL_TOKENS, "types": figures}
    print(json.dumps(report | {"limits": asdict(limits), "machine": describe_machine()}))


def line(name: str, found: dict[str, float]) -> str:
    """One row of the table; floats have no 8-bit limit."""
    of_dot = f"{found['of_dot']:.1%}" if "of_dot" in found else "-"
    return f"{name:8}{found['gops']:16.1f}{of_dot:>10}{found['gbps']:14.2f}{found['of_read']:>10.1%}"


def measure(table: str, type_: TensorType, decode_bytes: int, seconds: float) -> dict[str, float]:
    """GOP/s (two operations a weight and token) at many tokens, GB/s at one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((PREFILL_TOKENS, COLUMNS)).astype(np.float32)
    packed = random_weights(type_, PREFILL_ROWS, rng)
    prefill_s = best_seconds(lambda: kernels.matmul(table, type_.id, packed, PREFILL_ROWS, x), seconds)
    rows = decode_bytes // type_.num_bytes(COLUMNS) // 8 * 8
    packed = random_weights(type_, rows, rng)
    decode_s = best_seconds(lambda: kernels.matmul(table, type_.id, packed, rows, x[:1]), seconds)
    operations = 2 * PREFILL_ROWS * COLUMNS * PREFILL_TOKENS
    return {"gops": round(operations / prefill_s / 1e9, 1), "gbps": round(packed.size / decode_s / 1e9, 2)}


def random_weights(type_: TensorType, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Packed weights from one row of normal values: what they are does not change the speed."""
    raw = np.tile(quantize(rng.standard_normal(COLUMNS), type_), rows)
    return kernels.pack(type_.id, raw, rows, COLUMNS)


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Shortest run of `work` within about `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


if __name__ == "__main__":
    main()
