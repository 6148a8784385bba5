"""Diffusion on a GPU: LLaDA-8B's shape with random bf16 weights, and an autoregressive engine beside it.

    python -m benchmarks.gpu_diffusion [kernel] [tiny] [answers] [beside] [--shape llada-8b] [--folder DIR]

`answers`: 256 tokens after a prompt of 128, blocks of 32, greedy, every cache, one and two tokens a step, 1 and 16
requests, against naive decoding of one request after the other (NAIVE_S a step, a step a token). `beside`: the same
engine and qwen3-0.6b, each alone and both at once. `tiny`: the answer of tiny-diffusion here and on torch's CPU.
`kernel`: confidences against their definition. --folder: models that lie there are not written again. Needs no compiled
core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    from kvarn.backends.native import _native  # noqa: F401
except ImportError:  # only quantising would need it
    sys.modules["kvarn.backends.native._native"] = types.ModuleType("_native")

import kvarn
from kvarn.backends.batch import Batch
from kvarn.bench.diffusion import SPARSE
from kvarn.bench.observed_backend import observed
from kvarn.bench.synthetic import write_model

NAIVE_S = 0.032  # transformers: a whole canvas of 384 tokens and all of its logits, H200, bf16
PROMPT, TOKENS, BLOCK = 128, 256, 32
PARTS = ("kernel", "tiny", "answers", "beside")
# Cache, tokens a step, requests at once.
ROWS = [(cache, per_step, 1) for cache in ("none", "prefix", "dual", "sparse") for per_step in (1, 2)]
ROWS += [("prefix", 2, 16), ("dual", 1, 16), ("dual", 2, 16), ("sparse", 2, 16)]
MEMORY = Path("/dev/shm")
found: dict[str, Any] = {}


@dataclass
class Calls:
    """Passes of a backend, their rows, and the seconds spent in its calls."""

    passes: int = 0
    rows: int = 0
    calls_s: float = 0.0

    def forward_begins(self, batch: Batch, _: float) -> None:
        self.passes += 1
        self.rows += len(batch.token_ids)

    def call_ended(self, seconds: float) -> None:
        self.calls_s += seconds


def tell(name: str, figures: Any) -> None:
    found[name] = figures
    print(name, figures, flush=True)


def load(shape: str, folder: Path, **settings: Any) -> kvarn.LLM:
    """Tells the seconds of writing and of loading."""
    path, started = folder / f"{shape}.gguf", time.perf_counter()
    if not path.exists():
        write_model(path, shape, "BF16")
    written = time.perf_counter()
    llm = kvarn.LLM(path, config=kvarn.EngineConfig(backend="cuda", context=1024, **settings))
    tell(f"{shape} loaded", [round(written - started, 1), round(time.perf_counter() - written, 1)])
    return llm


def prompts(count: int) -> list[list[int]]:
    chooser = random.Random(count)
    return [[chooser.randrange(1000, 100_000) for _ in range(PROMPT)] for _ in range(count)]


def denoising(cache: str, per_step: int) -> kvarn.SamplingParams:
    cached = {"sparse": SPARSE} if cache == "sparse" else {"cache": cache}
    diffusion = kvarn.DiffusionParams(steps=TOKENS // per_step, block_length=BLOCK, canvas="fixed", **cached)
    return kvarn.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, diffusion=diffusion)


def measure_row(llm: kvarn.LLM, cache: str, per_step: int, count: int) -> None:
    """The second of two runs: the first captures what it meets."""
    asked, params = prompts(count), denoising(cache, per_step)
    llm.generate(asked, params)
    calls = Calls()
    with observed(llm._client, calls):
        started = time.perf_counter()
        answers = llm.generate(asked, params)
        took = time.perf_counter() - started
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    naive_s, ms = count * TOKENS * NAIVE_S, 1e3 / calls.passes
    tell(f"{cache} {per_step} a step, {count} at once", {
        "s": round(took, 3), "passes": calls.passes, "rows": calls.rows, "ms_per_pass": round(took * ms, 2),
        "of_that_in_python": round((took - calls.calls_s) * ms, 2), "times_naive": round(naive_s / took, 1),
    })  # fmt: skip


def compare(llm: kvarn.LLM) -> None:
    """The same requests one after the other and all at once, caches mixed."""
    asked = [(ids, denoising(("dual", "prefix", "sparse")[i % 3], 2 + i % 2)) for i, ids in enumerate(prompts(9))]
    together = [handle.result().token_ids for handle in [llm.submit(*one) for one in asked]]
    alone = [llm.generate(*one).token_ids for one in asked]
    tell("same alone and in company", f"{sum(a == b for a, b in zip(alone, together, strict=True))} of {len(asked)}")


def rate(llm: kvarn.LLM, asked: Sequence[Sequence[int]], params: kvarn.SamplingParams) -> float:
    started = time.perf_counter()
    counted = sum(answer.usage.completion_tokens for answer in llm.generate([list(ids) for ids in asked], params))
    return round(counted / (time.perf_counter() - started), 1)


def beside(llm: kvarn.LLM, folder: Path) -> None:
    """Tokens per second of both kinds, each alone and both at once in this process."""
    other = load("qwen3-0.6b", folder, kv_bytes=8 << 30, max_batch_tokens=2048, max_running=64)
    written = kvarn.SamplingParams(max_tokens=512, temperature=0.0, ignore_eos=True)
    jobs: dict[str, Callable[[], float]] = {
        "diffusion, 8 requests": lambda: rate(llm, prompts(8), denoising("dual", 2)),
        "autoregressive, 16 requests": lambda: rate(other, prompts(16), written),
    }
    for job in jobs.values():
        job()
    alone = {name: job() for name, job in jobs.items()}
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
        together = {name: one.result() for name, one in running.items()}
    tell("beside, tokens/s", {"alone": alone, "together": together})
    other.close()


def tiny() -> None:
    """A real model: what it writes here, and how far it agrees with float32 on the CPU."""
    params = kvarn.SamplingParams(max_tokens=96, diffusion=kvarn.DiffusionParams())
    texts, ids = {}, []
    for backend, device in (("cuda", None), ("torch", "cpu")):
        with kvarn.LLM("tiny-diffusion", config=kvarn.EngineConfig(backend=backend, device=device)) as llm:
            answer = llm.generate("Once upon a time", params)
        texts[backend] = answer.text
        ids.append(np.array(answer.token_ids))
    shared = min(map(len, ids))
    same = int((ids[0][:shared] == ids[1][:shared]).sum())
    tell("tiny-diffusion", {"same_tokens": f"{same} of {shared}", **texts})


def kernel() -> None:
    """Every id and nearly every bit of the definition, alone and in company."""
    import torch

    from kvarn.backends.torch.cuda.confidence import most_confident
    from kvarn.backends.torch.denoising.confidence import most_confident as defined

    logits = 2 * torch.randn(64, 126464, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ours, theirs = most_confident(logits, 126336), defined(logits, 126336)
    alone = [most_confident(logits[i : i + 1], 126336) for i in range(len(logits))]
    same = all(torch.equal(ours[part][i], one[part][0]) for i, one in enumerate(alone) for part in range(3))
    worst = [float((a - b).abs().max()) for a, b in zip(ours[1:], theirs[1:], strict=True)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        most_confident(logits[:32], 126336)
    torch.cuda.synchronize()
    us, same_ids = round((time.perf_counter() - started) * 1e6 / 20), torch.equal(ours[0], theirs[0])
    tell("confidence", {"same_ids": same_ids, "off_by": worst, "same_alone": same, "us_of_32_rows": us})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--shape", default="llada-8b")
    parser.add_argument("--folder", type=Path, help="where models lie or are written; else in memory, for this run")
    given = parser.parse_args()
    if "kernel" in given.parts:
        kernel()
    if "tiny" in given.parts:
        tiny()
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 40 << 30
    with tempfile.TemporaryDirectory(dir=MEMORY if in_memory else None) as name:
        if {"answers", "beside"} & set(given.parts):
            folder = given.folder or Path(name)
            llm = load(given.shape, folder, kv_bytes=16 << 30, max_batch_tokens=2048, max_running=32)
            if "answers" in given.parts:
                for row in ROWS:
                    measure_row(llm, *row)
                compare(llm)
            if "beside" in given.parts:
                beside(llm, folder)
            llm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
