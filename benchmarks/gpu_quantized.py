"""Packed weights on a GPU: one arithmetic for all rows, how fast each tiling is, and a Q4_K_M model beside bfloat16.

    python -m benchmarks.gpu_quantized [--part check] [--part times] [--part model] [--part kl] [--model FILE.gguf]
        [--out FILE.json]

Needs torch with CUDA and Triton; kernels are compiled in processes first. `check`: every type, tiling and number of
rows. `times`: microseconds inside a captured graph over several matrices; the dense product beside it is the fastest
of our tilings and the library. `model`: tokens per second of the shape of Llama-8B in Q4_K_M, packed and in bfloat16,
the same file. `kl`: KL(exact || packed) and KL(exact || bfloat16), exact being float32. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvarn.backends.torch.cuda.choose import CANDIDATES, Pick, _compute, replay_us
from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.cuda.quantized.matmuls import TILINGS, QuantizedMatmuls
from kvarn.backends.torch.cuda.quantized.matmuls import tilings as listed
from kvarn.backends.torch.cuda.quantized.pack import PACKINGS, PackedMatrix, QuantizedMatrix, pack, pack_float8, stack
from kvarn.backends.torch.cuda.quantized.products import (
    ONE_ROW_TILINGS,
    AnyTiling,
    PieceSums,
    multiply_any,
    values,
    write_values,
)
from kvarn.backends.torch.dequantize import dequantize
from kvarn.bench.synthetic import SCALES
from kvarn.formats.weights import TensorType as T

BF16, F32 = torch.bfloat16, torch.float32
STORE, ADD, GATED = Epilogue
RESULTS: dict[str, Any] = {"checks": {}, "times": {}}
CALLS = 8
BUCKETS = (1, 8, 16, 32, 128)
MAX_ERROR = 0.006  # of values, relative to the dequantised ones
SWEPT = (  # type, columns, depth, epilogue, type of the product: Llama-8B in Q4_K_M
    (T.Q4_K, 6144, 4096, STORE, BF16),
    (T.Q4_K, 4096, 4096, ADD, BF16),
    (T.Q4_K, 28672, 4096, GATED, BF16),
    (T.Q4_K, 4096, 14336, ADD, BF16),
    (T.Q6_K, 4096, 14336, ADD, BF16),
    (T.Q6_K, 1024, 4096, STORE, BF16),
    (T.Q6_K, 128256, 4096, STORE, F32),
)
OTHERS = tuple((type, 28672, 4096, STORE, BF16) for type in (T.Q4_0, T.Q5_K, T.Q8_0))
FLOAT8_NAME = "F8_E4M3"
CHECKED = ((STORE, BF16), (ADD, BF16), (GATED, BF16), (STORE, F32))
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


def tilings(case: Case, rows: int) -> list[AnyTiling]:
    type, columns, depth, epilogue, _ = case
    matrix = pack(stored(type, 256, depth), type, (256, depth))
    return listed(rows, replace(matrix, shape=(columns, depth)), epilogue)


def compile_one(job: tuple[T, AnyTiling, int, torch.dtype]) -> None:
    """In another process: what it leaves is in Triton's cache on disk."""
    type, tiling, epilogue, dtype = job
    matrix = pack(stored(type, 512, 4096), type, (512, 4096))
    x = torch.zeros(16, 4096, dtype=BF16, device="cuda")
    out = torch.zeros(16, 256 if epilogue == GATED else 512, dtype=dtype, device="cuda")
    multiply_any(x, matrix, out, Epilogue(epilogue), tiling, PieceSums.new(x.device))


def compile_all(cases: tuple[Case, ...]) -> None:
    jobs = {
        (case[0], tiling, int(case[3]), case[4]) for case in cases for rows in BUCKETS for tiling in tilings(case, rows)
    }
    begun = time.perf_counter()
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=2))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)


def float8(columns: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random codes of E4M3 and scales, one for 32 columns."""
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (columns, depth), dtype=torch.uint8, device="cuda", generator=generator)
    codes[(codes & 127) == 127] = 0x80  # no numbers
    return codes, 1e-3 * (1 + torch.rand(columns, depth // 32, device="cuda", generator=generator))


def made(type: str, columns: int, depth: int, seed: int = 0) -> tuple[Tensor, PackedMatrix]:
    """The values of a random matrix, and what kernels read of it."""
    if type != FLOAT8_NAME:
        raw = stored(T[type], columns, depth, seed)
        return dequantize(raw, T[type], (columns, depth), F32), pack(raw, T[type], (columns, depth))
    codes, scales = float8(columns, depth, seed)
    packed = pack_float8(codes, scales)
    assert packed is not None, "these can be packed"
    return codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(32, dim=1), packed


def check_all(types: list[str]) -> None:
    jobs = [(type, index) for type in types for index in range(len(CHECKED))]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        for found in pool.map(check_type, jobs):
            RESULTS["checks"].update(found)
    wrong = [name for name, detail in RESULTS["checks"].items() if detail]
    print(f"{len(RESULTS['checks'])} checks, {len(wrong)} wrong", flush=True)
    for name in wrong[:12]:
        print(f"FAIL {name}: {RESULTS['checks'][name]}"[:300], flush=True)


def check_type(job: tuple[str, int]) -> dict[str, str]:
    """In a process of its own: one type and one epilogue; what is wrong, by name."""
    type, (epilogue, dtype) = job[0], CHECKED[job[1]]
    shapes = ((512, 4096), (4096, 1280), (300, 2560), (384, 1120))
    found: dict[str, str] = {}
    for columns, depth in shapes[:3] if type.endswith("_K") else shapes:
        name, is_first = f"{type} {columns}x{depth} {epilogue.name} {dtype}", columns == shapes[0][0]
        dense, matrix = made(type, columns, depth, seed=columns)
        packed = values(matrix, BF16)
        error = float((packed.float() - dense).norm() / dense.norm())
        found[f"{name} values"] = "" if error < MAX_ERROR else f"{error:.5f}"
        ids = torch.randint(0, columns, (37,), device="cuda")
        looked_up = write_values(matrix, torch.empty(37, depth, dtype=BF16, device="cuda"), ids=ids)
        found[f"{name} lookup"] = "" if torch.equal(looked_up, packed[ids]) else "differs"
        matmuls, scratch = QuantizedMatmuls(), PieceSums.new(dense.device)
        parts = QuantizedMatrix(tuple(stack([matrix, dense.to(BF16), matrix])), BF16)
        listed = (*TILINGS.values(), ONE_ROW_TILINGS)
        picks = [one for some in listed for one in (some if is_first else (*some[:2], *some[-7::3]))]
        for rows in (1, 8, 16, 33, 100, 300):
            x = torch.randn(rows, depth, device="cuda").to(BF16)
            held = torch.randn(rows, columns // 2 if epilogue is GATED else columns, device="cuda").to(dtype)
            want = matmuls._compute(None, x, matrix, held.clone(), epilogue)
            bad = [
                one
                for one in picks
                if one.fits(matrix, epilogue, rows)
                and not torch.equal(multiply_any(x, matrix, held.clone(), epilogue, one, scratch), want)
            ]
            found[f"{name} {rows} rows"] = str(bad) if bad else ""
            if epilogue is STORE:
                exact = x.double() @ packed.double().T
                error = float((want.double() - exact).norm() / exact.norm())
                found[f"{name} {rows} rows error"] = "" if error < (1e-5 if dtype == F32 else 3e-3) else f"{error:.2e}"
                is_same = torch.equal(matmuls(x, parts)[:, -columns:], want.to(BF16))
                found[f"{name} {rows} rows parts"] = "" if is_same else "differs"
    return found


def time_case(case: Case, buckets: tuple[int, ...]) -> None:
    type, columns, depth, epilogue, dtype = case
    copies = max(2, min(CALLS, (256 << 20) // type.num_bytes(columns * depth)))
    matrices = [pack(stored(type, columns, depth, seed), type, (columns, depth)) for seed in range(copies)]
    dense = [values(one, BF16) for one in matrices[: max(2, (256 << 20) // (2 * columns * depth))]]
    num_bytes = sum(one.numel() * one.element_size() for one in matrices[0].planes)
    matmuls = QuantizedMatmuls()
    for rows in buckets:
        x = torch.randn(rows, depth, device="cuda").to(BF16)
        out = torch.zeros(rows, columns // 2 if epilogue is GATED else columns, dtype=dtype, device="cuda")

        def time_us(pick: AnyTiling | None, x: Tensor = x, out: Tensor = out) -> float:
            calls = [matrices[index % copies] for index in range(CALLS)]
            return replay_us(lambda: [matmuls._compute(pick, x, one, out, epilogue) for one in calls]) / CALLS

        picks: list[AnyTiling | None] = [*tilings(case, rows)] if rows <= 256 else []
        picks += [None] if rows >= 128 else []
        found = sorted((round(time_us(pick), 1), str(pick and tuple(getattr(pick, f) for f in pick.__slots__)))
                       for pick in picks)  # fmt: skip
        plain = min(dense_times(x, dense, out, epilogue))
        best, ratio = found[0][0], plain / found[0][0]
        name = f"{type.name} {columns}x{depth} {epilogue.name} {rows}"
        RESULTS["times"][name] = {"tilings": found, "dense": round(plain, 1), "ratio": round(ratio, 2)}
        rate = num_bytes / best / 1e6
        few = " ".join(f"{time} {tiling}" for time, tiling in found[:4])
        print(f"{name:30} {best:7.1f} us {rate:5.2f} TB/s, dense {plain:7.1f} us, x {ratio:4.2f} | {few}", flush=True)


def dense_times(x: Tensor, weights: list[Tensor], out: Tensor, epilogue: Epilogue) -> Iterator[float]:
    few = [one for one in CANDIDATES[:2] + CANDIDATES[4:7] if len(x) <= 2 * one.rows and one.rows <= max(16, len(x))]
    picks = [Pick(one) for one in few if one.fits(2, 1 + (epilogue is GATED))][:3]
    for pick in picks + [Pick(None)] * (len(x) > 16):
        calls = [weights[index % len(weights)] for index in range(CALLS)]
        yield replay_us(lambda pick=pick, calls=calls: [_compute(pick, x, w, out, epilogue) for w in calls]) / CALLS  # type: ignore[misc]


def measure_model(shape: str, type: str, rows: list[str], modes: list[str]) -> None:
    from benchmarks.gpu import LENGTHS, Bench
    from kvarn.bench.synthetic import write_model

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{shape}.gguf"
        begun = time.perf_counter()
        write_model(path, shape, type)
        print(f"written in {time.perf_counter() - begun:.0f} s", flush=True)
        for mode in modes:
            bench = Bench(shape, path, 8192, gpu_weights=mode)
            bench.measure("warm", [(64, 16)] * 4, 1)
            for row in rows:
                bench.measure(row, LENGTHS[row], 1 if row == "prefill" else 3)
            if mode == "packed":
                bench.compare()
            profile_decode(bench)
            bench.llm.close()
            found[mode] = bench.figures
    for row in rows:
        rates = {mode: figures[row]["value"] for mode, figures in found.items()}
        print(f"{shape} {type} {row}: {rates}, x {rates['packed'] / rates[modes[-1]]:.2f}", flush=True)
    RESULTS["model"] = found


def profile_decode(bench: Any) -> None:
    """Where the time of one request's steps goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        bench.measure("profiled", [(32, 33)], 1)
    events = sorted(found.key_averages(), key=lambda one: -one.device_time_total)[:9]
    for one in events:
        print(f"  {one.device_time_total / 32:8.1f} us a step, {one.count / 32:6.1f} x {one.key[:60]}", flush=True)


def measure_kl(path: Path | None) -> None:
    """Teacher-forced over one text, or random tokens of a random model."""
    import numpy as np

    from benchmarks.quality import _log_softmax, running_text
    from kvarn.bench.synthetic import write_model
    from kvarn.formats.open import open_weights
    from kvarn.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "random.gguf"
            write_model(path, "llama-3.2-1b", "Q4_K_M")
            ids = np.random.default_rng(0).integers(1000, 100_000, 256).tolist()
        else:
            ids = load_tokenizer(open_weights(path)).encode(running_text(), add_special=False)[:256]
        logits = {name: _log_softmax(_logits(path, ids, name)) for name in ("exact", "packed", "bf16")}
    exact = logits.pop("exact")
    RESULTS["kl"] = {
        name: {
            "kl": float((np.exp(exact) * (exact - other)).sum(axis=-1).mean()),
            "top1": float((exact.argmax(-1) == other.argmax(-1)).mean()),
        }
        for name, other in logits.items()
    }
    print(f"{path.name}: {RESULTS['kl']}", flush=True)


def _logits(path: Path, ids: list[int], name: str) -> Any:
    import numpy as np

    from kvarn.backends import select
    from kvarn.backends.batch import Batch, KVLayout
    from kvarn.config import EngineConfig
    from kvarn.formats.open import open_weights
    from kvarn.models.describe import describe

    config = EngineConfig(backend="cuda", gpu_weights="packed" if name == "packed" else "bf16")
    if name == "exact":
        config = EngineConfig(backend="torch", device="cpu")
    backend = select.make_backend(config, 16)
    description = describe(open_weights(path))
    spec = description.spec
    backend.load(spec, select.device_weights(spec, description.weights, config))
    size = select.block_size(config)
    kind = "f32" if name == "exact" else "bf16"
    layers = tuple((block.attention.num_kv_heads, block.attention.head_dim) for block in spec.blocks)
    layout = KVLayout(size, layers, kind)
    num_blocks = -(-len(ids) // size)
    backend.reserve_kv(layout, (num_blocks + 1) * layout.block_bytes)
    rows = np.arange(len(ids), dtype=np.int32)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    ends = np.asarray([0, len(ids)], np.int32)
    batch = Batch(np.asarray(ids, np.int32), rows, ends, ends[1:], table, rows)
    found = backend.logits(backend.forward(batch))
    backend.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=("check", "times", "model", "kl"))
    parser.add_argument("--row", action="append")
    parser.add_argument("--mode", action="append", choices=("packed", "bf16"))
    parser.add_argument("--type", action="append", help="of the checks")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    parts = given.part or ["check", "times", "model", "kl"]
    begun = time.perf_counter()
    if "times" in parts:
        compile_all(SWEPT + OTHERS)
        for case in SWEPT + OTHERS:
            buckets = (1, 16) if case[1] <= 1024 else ((*BUCKETS, 2048) if case in SWEPT else (1, 32))
            try:
                time_case(case, buckets)
            except (RuntimeError, ValueError):  # the other cases are worth knowing, too
                traceback.print_exc()
        print(f"-- times after {time.perf_counter() - begun:.0f} s", flush=True)
    if "check" in parts:
        types = [*(type.name for type in PACKINGS), FLOAT8_NAME]
        check_all([type for type in types if not given.type or type in given.type])
        print(f"-- checks after {time.perf_counter() - begun:.0f} s", flush=True)
    if "kl" in parts:
        measure_kl(given.model)
        print(f"-- kl after {time.perf_counter() - begun:.0f} s", flush=True)
    if "model" in parts:
        rows, modes = given.row or ["bs 1", "bs 8", "bs 32", "prefill"], given.mode or ["packed", "bf16"]
        measure_model("llama-3.1-8b", "Q4_K_M", rows, modes)
        print(f"-- model after {time.perf_counter() - begun:.0f} s", flush=True)
    wrong = {name: detail for name, detail in RESULTS["checks"].items() if detail}
    RESULTS["checks"] = {"num": len(RESULTS["checks"]), "wrong": wrong}
    if given.out:
        Path(given.out).write_text(json.dumps(RESULTS, indent=1) + "\n")
    if len(json.dumps(RESULTS)) > 6000:
        RESULTS["times"] = "in the file"
    print(json.dumps(RESULTS)[:6000])


if __name__ == "__main__":
    main()
