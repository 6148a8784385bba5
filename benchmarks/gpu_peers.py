"""Kvarn and vLLM on the same GPU, row by row in turns: both are loaded, one computes while the other waits.

    python -m benchmarks.gpu_peers [--shape qwen3-0.6b] [--shape llama-3.1-8b] [--row "bs 32"] [--runs 3]
                                   [--vllm-python PYTHON]

Rows, prompts and answers are those of benchmarks.gpu; random weights, bfloat16, greedy. --vllm-python: an environment
that has vLLM. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import CONTEXT, KV_BYTES, LENGTHS, ROWS

ENGINES = ("kvarn", "vllm")
BATCH_TOKENS, MAX_RUNNING = 8192, 256
VLLM_SHARE = 0.45  # of the GPU's memory; Kvarn takes its weights and KV_BYTES beside it
Generate = Callable[[list[list[int]], list[int]], int]  # prompts, tokens of each answer -> tokens answered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append")
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(*given.worker)
        return
    if subprocess.run([given.vllm_python, "-c", "import vllm"], stderr=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"{given.vllm_python} has no vLLM that can be imported; name one that has with --vllm-python")
    shapes = given.shape or ["qwen3-0.6b", "llama-3.1-8b"]
    print(json.dumps({shape: _compare(shape, given) for shape in shapes}))


def _compare(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Medians of each row, the two engines in turns."""
    with tempfile.TemporaryDirectory() as folder:
        models = _write(shape, Path(folder))
        pythons = {"kvarn": sys.executable, "vllm": given.vllm_python}
        workers = {name: Worker(pythons[name], name, models[name]) for name in ENGINES}
        found: dict[str, Any] = {}
        for row in given.row or ROWS:
            seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
            for _ in range(given.runs + 1):
                for name in ENGINES:
                    seconds[name].append(workers[name].run(row))
            medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up
            ratio = round(medians["vllm"] / medians["kvarn"], 3)
            found[row] = {"seconds": seconds, "kvarn_is_faster_by": ratio}
            print(shape, row, found[row], flush=True)
        for worker in workers.values():
            worker.close()
        return found


class Worker:
    """An engine in a process of its own, which runs the rows that it is told."""

    def __init__(self, python: str, engine: str, model: Path) -> None:
        command = [python, "-m", "benchmarks.gpu_peers", "--worker", engine, str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # it is loaded

    def run(self, row: str) -> float:
        assert self._process.stdin is not None
        print(row, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ")
        sys.exit(f"an engine ended with {self._process.wait()}; the reason is above")


def _work(engine: str, model: str) -> None:
    generate = (_kvarn if engine == "kvarn" else _vllm)(model)
    chooser = random.Random(0)
    print("answer ready", flush=True)
    for line in sys.stdin:
        lengths = LENGTHS[line.strip()]
        prompts = [[chooser.randrange(1000, 100_000) for _ in range(length)] for length, _ in lengths]
        answers = [answer for _, answer in lengths]
        started = time.perf_counter()
        num_tokens = generate(prompts, answers)
        took = time.perf_counter() - started
        assert num_tokens == sum(answers), f"{num_tokens} tokens came, not {sum(answers)}"
        print("answer", took, flush=True)


def _kvarn(model: str) -> Generate:
    import kvarn

    config = kvarn.EngineConfig(
        backend="cuda", context=CONTEXT, kv_bytes=KV_BYTES, max_batch_tokens=BATCH_TOKENS, max_running=MAX_RUNNING
    )
    llm = kvarn.LLM(model, config=config)

    def generate(prompts: list[list[int]], answers: list[int]) -> int:
        params = [kvarn.SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True) for num in answers]
        return sum(len(one.token_ids) for one in llm.generate(prompts, params))

    return generate


def _vllm(model: str) -> Generate:
    import vllm

    llm = vllm.LLM(
        model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=CONTEXT,
        gpu_memory_utilization=VLLM_SHARE, max_num_batched_tokens=BATCH_TOKENS, max_num_seqs=MAX_RUNNING,
        enable_prefix_caching=True,
    )  # fmt: skip

    def generate(prompts: list[list[int]], answers: list[int]) -> int:
        params = [
            vllm.SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True, detokenize=False) for num in answers
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(inputs, params, use_tqdm=False))

    return generate


def _write(shape: str, folder: Path) -> dict[str, Path]:
    """A file for Kvarn, and a folder with a configuration for vLLM, which makes up its own weights."""
    from kvarn.bench.synthetic import SHAPES, write_model

    one = SHAPES[shape]
    write_model(folder / f"{shape}.gguf", shape, "BF16")
    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[one.architecture]
    (folder / "vllm").mkdir()
    config = {
        "architectures": [architecture], "model_type": one.architecture, "hidden_size": one.width,
        "intermediate_size": one.hidden, "num_hidden_layers": one.layers, "num_attention_heads": one.heads,
        "num_key_value_heads": one.kv_heads, "head_dim": one.head_dim, "vocab_size": one.vocab,
        "max_position_embeddings": one.context, "rope_theta": one.rope_base, "rms_norm_eps": one.eps,
        "tie_word_embeddings": one.tied, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "vllm" / "config.json").write_text(json.dumps(config))
    return {"kvarn": folder / f"{shape}.gguf", "vllm": folder / "vllm"}


if __name__ == "__main__":
    main()
