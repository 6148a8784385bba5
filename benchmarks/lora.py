"""What adapters cost: tokens per second on LoRA adapters beside the base, one user and eight on as many adapters.

    python -m benchmarks.lora [--model PATH] [--rank 8] [--users 8] [--rounds 7] [--threads 1] [--write NAME]

Adapters are random ones for all linear matrices. Base and adapters take turns within a round, and the ratio is the
median over rounds of CPU seconds (of the process, all threads): on a machine that others use, time of the clock says
little. The clock's ratio is told beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.assets import qwen_coder, smollm2
from tests.lora_files import Pairs
from tests.results import write_result

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.adapters.targets import target_shapes
from kvarn.models.spec import ModelSpec

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODELS = {"qwen-coder": qwen_coder, "smollm2": smollm2}


def main() -> None:
    """Print a table for people and one JSON line, last, for machines."""
    options = _options()
    path = MODELS[options.model]() if options.model in MODELS else Path(options.model)
    config = EngineConfig(threads=options.threads, context=1024, prefix_cache=False)
    with LLM(str(path), config=config) as llm, tempfile.TemporaryDirectory() as folder:
        names = [f"user{i}" for i in range(options.users)]
        for seed, name in enumerate(names):
            llm.load_lora(write_adapter(Path(folder) / name, llm.spec, options.rank, seed), name)
        found: dict[str, Any] = {"model": path.name, "rank": options.rank, "threads": options.threads, "isa": llm.isa}
        found["adapter_bytes"] = llm.loras[0].num_bytes
        for users in (1, options.users):
            found[f"users_{users}"] = compare(llm, names[:users], options)
    if options.write:
        words = sys.argv[1:]
        write_result(options.write, found, command=f"python -m benchmarks.lora {shlex.join(words)}")
    print(json.dumps(found))


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """A PEFT folder with random pairs for all linear matrices."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(PARTS.values())}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    pairs = random_adapter(spec, rank, seed)
    halves = {f"base_model.model.{name}": pair for name, pair in pairs.items()}
    tensors = {f"{name}.lora_{half}.weight": pair[i] for name, pair in halves.items() for i, half in enumerate("AB")}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_adapter(spec: ModelSpec, rank: int, seed: int) -> Pairs:
    """A and B for all linear matrices, by PEFT's names."""
    rng, pairs = np.random.default_rng(seed), {}
    for name, (rows, columns) in target_shapes(spec).items():
        _, _, rest = name.partition("blk.")
        layer, _, part = rest.partition(".")
        if part in PARTS:
            a, b = rng.standard_normal((rank, columns), np.float32), rng.standard_normal((rows, rank), np.float32)
            pairs[f"model.layers.{layer}.{PARTS[part]}"] = a / 30, b / 300
    return pairs


def compare(llm: LLM, names: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Base and adapters in turns."""
    plain: list[str | None] = [None] * len(names)
    _measure(llm, plain, options.tokens // 4)
    _measure(llm, list(names), options.tokens // 4)
    rounds = []
    for number in range(options.rounds):
        order = (plain, list(names)) if number % 2 else (list(names), plain)
        times = {which is plain: _measure(llm, which, options.tokens) for which in order}
        rounds.append((times[True], times[False]))
    ratios = [base[0] / lora[0] for base, lora in rounds]
    cpu = statistics.median(ratios)
    clock = statistics.median(base[1] / lora[1] for base, lora in rounds)
    rate = statistics.median(len(names) * options.tokens / lora[1] for _, lora in rounds)
    print(f"{len(names):3} users: {cpu:.3f} x the base by CPU time, {clock:.3f} x by the clock, {rate:.1f} tokens/s")
    figures = {"cpu_ratio": cpu, "cpu_ratio_least": min(ratios), "cpu_ratio_most": max(ratios)}
    return {name: round(one, 4) for name, one in (figures | {"clock_ratio": clock, "tokens_per_s": rate}).items()}


def _measure(llm: LLM, loras: list[str | None], num_tokens: int) -> tuple[float, float]:
    """CPU seconds and seconds of the clock for so many tokens of each."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    prompts = [f"def function_{i}(" for i in range(len(loras))]
    begun = time.process_time(), time.perf_counter()
    llm.generate(prompts, params, lora=loras)
    return time.process_time() - begun[0], time.perf_counter() - begun[1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen-coder", help=f"a path, or one of {', '.join(MODELS)}")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
