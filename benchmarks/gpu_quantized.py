"""Packed weights on a GPU: the dense path's bits, how fast each tiling is, and a Q4_K_M model beside bfloat16.

    python -m benchmarks.gpu_quantized [--part check] [--part times] [--part model] [--bf16 213] [--out FILE.json]

Needs torch with CUDA and Triton; kernels are compiled in processes first. `times`: microseconds inside a captured graph
over several matrices; the dense product beside it is the fastest of our tilings and the library. `model`: tokens per
second of the shape of Llama-8B, one request, over --bf16, what benchmarks.gpu gives for BF16. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvarn.backends.torch.cuda.choose import CANDIDATES, Pick, _compute, replay_us
from kvarn.backends.torch.cuda.matmul import Epilogue, default_tiling, multiply
from kvarn.backends.torch.cuda.quantized.matmuls import TILINGS, QuantizedMatmuls
from kvarn.backends.torch.cuda.quantized.pack import PACKINGS, PackedMatrix, QuantizedMatrix, pack, stack
from kvarn.backends.torch.cuda.quantized.products import PackedTiling, multiply_packed, values, write_values
from kvarn.backends.torch.dequantize import dequantize
from kvarn.bench.synthetic import SCALES
from kvarn.formats.weights import TensorType as T

BF16, F32 = torch.bfloat16, torch.float32
STORE, ADD, GATED = Epilogue
RESULTS: dict[str, Any] = {"checks": {}, "times": {}}
CALLS = 8
SWEEP = {  # columns, stages, warps
    16: (
        *((16, 4, 1), (16, 8, 1), (32, 4, 1), (32, 4, 2), (32, 6, 2), (32, 8, 2), (32, 4, 4), (64, 4, 2), (64, 4, 4)),
        *((64, 6, 4), (128, 3, 4), (128, 4, 8)),
    ),
    32: ((32, 4, 2), (32, 4, 1), (64, 4, 2), (64, 4, 4), (128, 3, 4), (128, 3, 8)),
    64: ((32, 4, 2), (32, 4, 4), (64, 3, 2), (64, 3, 4), (128, 3, 4), (128, 3, 8)),
    128: ((64, 2, 4), (64, 2, 8), (64, 3, 4), (128, 2, 4), (128, 2, 8)),
}
SWEPT = (  # type, columns, depth, epilogue, type of the product: Llama-8B in Q4_K_M
    (T.Q4_K, 6144, 4096, STORE, BF16),
    (T.Q4_K, 4096, 4096, ADD, BF16),
    (T.Q4_K, 28672, 4096, GATED, BF16),
    (T.Q4_K, 4096, 14336, ADD, BF16),
    (T.Q6_K, 4096, 14336, ADD, BF16),
    (T.Q6_K, 1024, 4096, STORE, BF16),
    (T.Q6_K, 128256, 4096, STORE, F32),
)
OTHERS = tuple(
    (type, 28672, 4096, STORE, BF16) for type in (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q5_K, T.Q8_0)
)  # with the tilings of TILINGS alone
Case = tuple[T, int, int, Epilogue, torch.dtype]


def stored(type: T, columns: int, depth: int, seed: int = 0) -> Tensor:
    """Random blocks on the GPU whose values are of unit size."""
    generator = torch.Generator("cuda").manual_seed(seed)
    count = columns * depth // type.block_values
    blocks = torch.randint(0, 256, (count, type.block_bytes), dtype=torch.uint8, device="cuda", generator=generator)
    scale_at, min_at, ratio = SCALES[type]
    for at, factor in ((scale_at, 1.0), (min_at, ratio)):
        if at is not None:
            halves = (1e-3 * factor * (1 + torch.rand(count, 1, device="cuda", generator=generator))).half()
            blocks[:, at : at + 2] = halves.view(torch.uint8)
    return blocks.view(-1)


def tilings(case: Case, rows: int) -> list[PackedTiling]:
    type, _, _, epilogue, _ = case
    tile = next((size for size in SWEEP if rows <= size), max(SWEEP))
    listed = (SWEEP if case in SWEPT else TILINGS)[tile]
    found = [PackedTiling(tile, *one) for one in listed]
    return [one for one in found if one.fits(PACKINGS[type].bits, 1 + (epilogue is GATED))]


def compile_one(job: tuple[T, PackedTiling, int, torch.dtype]) -> None:
    """In another process: what it leaves is in Triton's cache on disk."""
    type, tiling, epilogue, dtype = job
    matrix = pack(stored(type, 512, 512), type, (512, 512))
    x = torch.zeros(16, 512, dtype=BF16, device="cuda")
    out = torch.zeros(16, 256 if epilogue == GATED else 512, dtype=dtype, device="cuda")
    multiply_packed(x, matrix, out, Epilogue(epilogue), tiling)


def compile_all(cases: tuple[Case, ...]) -> None:
    jobs = {
        (case[0], tiling, int(case[3]), case[4]) for case in cases for rows in SWEEP for tiling in tilings(case, rows)
    }
    begun = time.perf_counter()
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=2))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)


def check(name: str, is_right: bool, detail: str = "") -> None:
    RESULTS["checks"][name] = bool(is_right)
    if not is_right:
        print(f"FAIL {name} {detail}", flush=True)


def check_type(type: T) -> None:
    for columns, depth in ((512, 4096), (4096, 1024), (300, 512), *(((384, 576),) if type.block_values == 32 else ())):
        raw = stored(type, columns, depth, seed=columns)
        dense, matrix = dequantize(raw, type, (columns, depth), BF16), pack(raw, type, (columns, depth))
        name = f"{type.name} {columns}x{depth}"
        check(f"{name} values", torch.equal(values(matrix, BF16), dense))
        ids = torch.randint(0, columns, (37,), device="cuda")
        looked_up = write_values(matrix, torch.empty(37, depth, dtype=BF16, device="cuda"), ids=ids)
        check(f"{name} lookup", torch.equal(looked_up, dense[ids]))
        matmuls, parts = QuantizedMatmuls(), QuantizedMatrix(tuple(stack([matrix, dense, matrix])), BF16)
        whole = torch.cat([dense] * 3)
        for rows in (1, 16, 33, 100, 256, 300):
            x = torch.randn(rows, depth, device="cuda").to(BF16)
            for epilogue, dtype in ((STORE, BF16), (ADD, BF16), (GATED, BF16), (STORE, F32)):
                held = torch.randn(rows, columns // 2 if epilogue is GATED else columns, device="cuda").to(dtype)
                tile = next((size for size in TILINGS if rows <= size), max(TILINGS))
                usual = [PackedTiling(tile, *one) for one in TILINGS[tile]]
                usual = [one for one in usual if one.fits(PACKINGS[type].bits, 1 + (epilogue is GATED))]
                want = multiply(x, dense, held.clone(), epilogue, default_tiling(1, epilogue, 2))
                bad = [t for t in usual if not torch.equal(multiply_packed(x, matrix, held.clone(), epilogue, t), want)]
                check(f"{name} {rows} rows {epilogue.name} {dtype}", not bad, str(bad))
                by_values = matmuls._compute(None, x, matrix, held.clone(), epilogue)
                check(f"{name} {rows} rows {epilogue.name} {dtype} by values", torch.equal(by_values, want))
            want = multiply(x, whole, x.new_empty(rows, len(whole)), STORE, default_tiling(1, STORE, 2))
            check(f"{name} {rows} rows parts", torch.equal(matmuls(x, parts), want))
    print(f"{type.name} checked, {sum(not one for one in RESULTS['checks'].values())} wrong so far", flush=True)


def time_case(case: Case, buckets: tuple[int, ...]) -> None:
    type, columns, depth, epilogue, dtype = case
    copies = max(2, min(CALLS, (256 << 20) // type.num_bytes(columns * depth)))
    matrices = [pack(stored(type, columns, depth, seed), type, (columns, depth)) for seed in range(copies)]
    dense = [values(one, BF16) for one in matrices[: max(2, (256 << 20) // (2 * columns * depth))]]
    num_bytes = sum(one.numel() * one.element_size() for one in planes(matrices[0]))
    matmuls = QuantizedMatmuls()
    for rows in buckets:
        x = torch.randn(rows, depth, device="cuda").to(BF16)
        out = torch.zeros(rows, columns // 2 if epilogue is GATED else columns, dtype=dtype, device="cuda")

        def time_us(pick: PackedTiling | None, x: Tensor = x, out: Tensor = out) -> float:
            calls = [matrices[index % copies] for index in range(CALLS)]
            return replay_us(lambda: [matmuls._compute(pick, x, one, out, epilogue) for one in calls]) / CALLS

        picks: list[PackedTiling | None] = [*tilings(case, rows)] + ([None] if rows >= 128 else [])
        found = sorted((round(time_us(pick), 1), str(pick and tuple(getattr(pick, f) for f in pick.__slots__)))
                       for pick in picks)  # fmt: skip
        plain = min(dense_times(x, dense, out, epilogue))
        best, ratio = found[0][0], plain / found[0][0]
        name = f"{type.name} {columns}x{depth} {epilogue.name} {rows}"
        RESULTS["times"][name] = {"tilings": found, "dense": round(plain, 1), "ratio": round(ratio, 2)}
        rate = num_bytes / best / 1e6
        print(
            f"{name:32} {best:7.1f} us {rate:5.2f} TB/s, dense {plain:7.1f} us, x {ratio:4.2f}  {found[:3]}", flush=True
        )


def dense_times(x: Tensor, weights: list[Tensor], out: Tensor, epilogue: Epilogue) -> Iterator[float]:
    few = [one for one in CANDIDATES[:2] + CANDIDATES[4:7] if len(x) <= 2 * one.rows and one.rows <= max(16, len(x))]
    picks = [Pick(one) for one in few if one.fits(2, 1 + (epilogue is GATED))][:3]
    for pick in picks + [Pick(None)] * (len(x) > 16):
        calls = [weights[index % len(weights)] for index in range(CALLS)]
        yield replay_us(lambda pick=pick, calls=calls: [_compute(pick, x, w, out, epilogue) for w in calls]) / CALLS  # type: ignore[misc]


def planes(matrix: PackedMatrix) -> list[Tensor]:
    return [one for one in (matrix.low, matrix.high, matrix.scales) if one is not None]


def measure_model(shape: str, type: str, bf16: float, rows: list[str]) -> None:
    from benchmarks.gpu import LENGTHS, Bench

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, type, Path(folder), 8192)
        bench.measure("warm", [(64, 16)] * 4, 1)
        for row in rows:
            bench.measure(row, LENGTHS[row], 3)
        bench.compare()
        bench.llm.close()
    rate = bench.figures[rows[0]]["value"]
    print(f"{shape} {type} {rows[0]}: {rate} tokens/s, x {rate / bf16:.2f} of {bf16} in bfloat16", flush=True)
    RESULTS["model"] = bench.figures | {"ratio": round(rate / bf16, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=("check", "times", "model"))
    parser.add_argument("--bf16", type=float, default=213.0)
    parser.add_argument("--row", action="append")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    parts = given.part or ["check", "times", "model"]
    begun = time.perf_counter()
    if "times" in parts:
        compile_all(SWEPT + OTHERS)
        for case in SWEPT:
            time_case(case, (16, 32, 64, 128, 256) if case[2] == 4096 and case[1] > 1024 else (16, 64))
        for case in OTHERS:
            time_case(case, (16, 64))
        print(f"-- times after {time.perf_counter() - begun:.0f} s", flush=True)
    if "check" in parts:
        for type in PACKINGS:
            check_type(type)
        print(f"-- checks after {time.perf_counter() - begun:.0f} s", flush=True)
    if "model" in parts:
        measure_model("llama-3.1-8b", "Q4_K_M", given.bf16, given.row or ["bs 1"])
    print(f"wrong: {[name for name, is_right in RESULTS['checks'].items() if not is_right]}"[:2000])
    RESULTS["checks"] = {"num": len(RESULTS["checks"]), "right": sum(RESULTS["checks"].values())}
    if given.out:
        Path(given.out).write_text(json.dumps(RESULTS, indent=1) + "\n")
    print(json.dumps(RESULTS if len(json.dumps(RESULTS)) < 6000 else {**RESULTS, "times": "in the file"}))


if __name__ == "__main__":
    main()
