"""Tokens per second of the whole engine on a GPU: kvarn.LLM with random weights, greedy, prompts included.

    python -m benchmarks.gpu [--shape llama-3.1-8b] [--shape qwen3-0.6b] [--type BF16] [--runs 3] [--out FILE.json]

Rows: `bs N`: N prompts of 128 tokens, 256 tokens each answered; `mixed`: 256 prompts and answers of 100 to 1,024;
`prefill`: 64 prompts of 2,048, one token each; `ttft`: one prompt of 2,048. Also whether a request answers the same
alone and in company. The medians of the runs; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvarn
from kvarn.bench.synthetic import write_model

CONTEXT = 2304
KV_BYTES = 40 << 30
# What vLLM 0.25.1 reached on the same kind of GPU, in tokens per second (ttft: milliseconds).
ROWS = ("bs 1", "bs 8", "bs 32", "bs 128", "bs 256", "mixed", "prefill", "ttft")
VLLM = {
    "llama-3.1-8b": dict(zip(ROWS, (204, 1537, 5413, 14473, 18243, 10064, 42600, 47), strict=True)),
    "qwen3-0.6b": dict(zip(ROWS, (432, 3074, 10345, 25369, 32464, 20680, 403000, 27), strict=True)),
}


_CHOOSER = random.Random(0)
# Of each row: the tokens of prompt and answer of every request.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    **{f"bs {count}": [(128, 256)] * count for count in (1, 8, 32, 128, 256)},
    "mixed": [(_CHOOSER.randint(100, 1024), _CHOOSER.randint(100, 1024)) for _ in range(256)],
    "prefill": [(2048, 1)] * 64,
    "ttft": [(2048, 1)],
}


class Bench:
    """One model on the GPU, and what was measured."""

    def __init__(self, shape: str, path: Path, batch_tokens: int, gpu_weights: str = "packed") -> None:
        started = time.perf_counter()
        config = kvarn.EngineConfig(
            backend="cuda", context=CONTEXT, kv_bytes=KV_BYTES, max_batch_tokens=batch_tokens, max_running=256,
            gpu_weights=gpu_weights,
        )  # fmt: skip
        self.llm = kvarn.LLM(path, config=config)
        self.shape = shape
        self.random = random.Random(0)
        self.figures: dict[str, Any] = {"load_s": round(time.perf_counter() - started, 1)}
        print(shape, self.figures, flush=True)

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(1000, 100_000) for _ in range(length)]

    def measure(self, row: str, lengths: Sequence[tuple[int, int]], runs: int) -> None:
        """lengths: tokens of prompt and answer of each request."""
        rates = []
        for _ in range(runs):
            prompts = [self.prompt(num) for num, _ in lengths]
            params = [kvarn.SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True) for _, num in lengths]
            started = time.perf_counter()
            answered = sum(answer.usage.completion_tokens for answer in self.llm.generate(prompts, params))
            took = time.perf_counter() - started
            counted = sum(num for num, _ in lengths) if row == "prefill" else answered
            rates.append(1e3 * took if row == "ttft" else counted / took)
        peer = VLLM.get(self.shape, {}).get(row)
        value = statistics.median(rates)
        ratio = None if peer is None else round(peer / value if row == "ttft" else value / peer, 3)
        self.figures[row] = {"value": round(value, 1), "all": [round(one, 1) for one in rates], "of_vllm": ratio}
        print(self.shape, row, self.figures[row], flush=True)

    def compare(self) -> None:
        """The same requests one after the other and all at once, greedy and sampled."""
        requests = [
            (self.prompt(self.random.randint(20, 700)), kvarn.SamplingParams(
                max_tokens=self.random.randint(5, 60), temperature=0.8 * (i % 2), top_p=0.9, seed=i, ignore_eos=True))
            for i in range(40)
        ]  # fmt: skip
        together = [handle.result().token_ids for handle in [self.llm.submit(*one) for one in requests]]
        alone = [self.llm.generate(*one).token_ids for one in requests]
        self.figures["same"] = sum(a == b for a, b in zip(alone, together, strict=True))
        print(self.shape, "same alone and in company:", self.figures["same"], "of 40", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append")
    parser.add_argument("--type", default="BF16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--row", action="append", choices=ROWS, help="only these")
    parser.add_argument("--folder", help="where models lie already, by shape; others are written there")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    found: dict[str, Any] = {"batch_tokens": given.batch_tokens}
    with tempfile.TemporaryDirectory() as folder:
        for shape in given.shape or ["qwen3-0.6b", "llama-3.1-8b"]:
            path = Path(given.folder or folder) / f"{shape}.gguf"
            if not path.exists():
                write_model(path, shape, given.type)
            bench = Bench(shape, path, given.batch_tokens)
            bench.measure("warm", [(64, 16)] * 4, 1)
            for row in given.row or ROWS:
                bench.measure(row, LENGTHS[row], given.runs)
            bench.compare()
            bench.llm.close()
            found[shape] = bench.figures
    print(json.dumps(found))
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
