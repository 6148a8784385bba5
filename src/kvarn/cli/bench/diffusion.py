"""`kvarn bench diffusion`: what caches and parallel acceptance give a diffusion model on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import EngineOptions, Threads, open_llm

if TYPE_CHECKING:
    from kvarn.bench.diffusion import DiffusionBench, WayCost
    from kvarn.llm import LLM

HEADINGS = ("tokens/s", "of full", "CPU s", "steps", "rows", "outside keys")


def bench_diffusion(
    model: Annotated[str, typer.Argument(help="A full-attention diffusion model.")],
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue. [default: random]")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of random prompts.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Length of the answers.")] = 256,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens of a block.")] = 32,
    way: Annotated[list[str] | None, typer.Option("--way", "-w", help="Measure this way only; repeat.")] = None,
    requests: Annotated[int, typer.Option("--requests", "-r", min=0, max=64, help="At once; 0: none.")] = 8,
    beside: Annotated[str | None, typer.Option("--beside", help="An autoregressive model to run beside it.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Measurements of each way.")] = 1,
    length: Annotated[
        list[int] | None, typer.Option("--length", "-l", min=1, help="Compare caches at this length too; repeat.")
    ] = None,
    attention: Annotated[bool, typer.Option(help="Time attention at 2,048 tokens of context.")] = True,
    threads: Threads = None,
) -> None:
    """Tokens per second of every cache, with and without a threshold, against recomputing everything."""
    from kvarn.bench.diffusion import DiffusionBench, random_prompt, require_diffusion
    from kvarn.errors import ConfigError

    bench = DiffusionBench(prompt_tokens, tokens, block, rounds=rounds)
    if unknown := set(way or ()) - set(bench.ways):
        raise ConfigError(f"way is {min(unknown)!r:.60}; choose of {', '.join(bench.ways)}")
    with open_llm(model, EngineOptions(threads)) as llm:
        require_diffusion(llm)
        ids = random_prompt(llm, bench) if prompt is None else llm.tokenizer.encode(prompt)
        costs = _measure_ways(llm, bench, way or bench.ways, ids)
        report = _report(llm, bench, costs) | _memory(llm, bench, ids)
        report |= _measure_load(llm, bench, costs, requests, attention)
        if length:
            report |= _measure_lengths(llm, bench, length)
        if beside is not None:
            report |= _measure_beside(llm, bench, beside, threads)
    print(json.dumps(report), flush=True)


def _measure_ways(llm: LLM, bench: DiffusionBench, ways: Sequence[str], ids: Sequence[int]) -> dict[str, WayCost]:
    from kvarn.bench.diffusion import FULL, measure_way

    print(f"{'way':<18}" + ("{:>13}" * len(HEADINGS)).format(*HEADINGS))
    costs: dict[str, WayCost] = {}
    for name in ways:
        cost = costs[name] = measure_way(llm, bench, name, ids)
        ratio = f"{cost.tokens_per_s / costs[FULL].tokens_per_s:.2f} x" if FULL in costs else ""
        cells = [f"{cost.tokens_per_s:.2f}", ratio, f"{cost.cpu_s:.1f}"]
        cells += [f"{cost.steps:,}", f"{cost.rows:,}", f"{cost.outside_keys:.0f}"]
        print(f"{name:<18}" + ("{:>13}" * len(cells)).format(*cells), flush=True)
    return costs


def _report(llm: LLM, bench: DiffusionBench, costs: dict[str, WayCost]) -> dict[str, Any]:
    from kvarn.bench.report import describe_machine

    return {
        "bench": "diffusion",
        "model": llm.spec.name,
        "backend": llm.backend_name,
        "machine": describe_machine(),
        "plan": asdict(bench),
        "ways": {name: asdict(cost) | {"tokens_per_s": round(cost.tokens_per_s, 3)} for name, cost in costs.items()},
    }


def _memory(llm: LLM, bench: DiffusionBench, ids: Sequence[int]) -> dict[str, Any]:
    """Peak of logits, against those of one block and of the whole canvas at once."""
    from kvarn.bench.diffusion import backend_of

    peak = getattr(backend_of(llm), "logit_bytes", None)
    if peak is None:
        return {}
    row = 4 * llm.spec.vocab_size
    shares = {"of_block": peak / (bench.block * row), "of_canvas": peak / ((len(ids) + bench.tokens) * row)}
    print(f"logits: {peak:,} bytes at most, {shares['of_block']:.3f} of those of a block of {bench.block}")
    return {"logit_bytes": peak} | shares


def _measure_load(
    llm: LLM, bench: DiffusionBench, costs: dict[str, WayCost], requests: int, has_attention: bool
) -> dict[str, Any]:
    from kvarn.bench.diffusion import measure_attention, measure_concurrent

    found: dict[str, Any] = {}
    if requests and (alone := costs.get("dual+threshold")):
        concurrent = measure_concurrent(llm, bench, requests, alone)
        found["crowd"] = asdict(concurrent)
        print(
            f"{requests} at once: {concurrent.tokens_per_s:.2f} tokens/s, {concurrent.gain:.2f} x one alone,", end=" "
        )
        print(f"the slowest {concurrent.slowest:.2f} x the mean")
    if has_attention:
        cost = measure_attention(llm, bench)
        found["attention"] = asdict(cost) | {"ratio": cost.ratio}
        print(f"attention at {cost.context:,}: dual {cost.dual_ms:.1f} ms, sparse {cost.sparse_ms:.1f} ms", end=" ")
        print(f"= {cost.ratio:.2f} x")
    return found


def _measure_lengths(llm: LLM, bench: DiffusionBench, lengths: Sequence[int]) -> dict[str, Any]:
    from kvarn.bench.diffusion import measure_lengths

    found = measure_lengths(llm, bench, lengths)
    for length, ratios in found.items():
        print(f"{length:>6} tokens: " + ", ".join(f"{way} {ratio:.2f} x full's time" for way, ratio in ratios.items()))
    return {"time_by_length": found}


def _measure_beside(llm: LLM, bench: DiffusionBench, beside: str, threads: int | None) -> dict[str, Any]:
    from kvarn.bench.diffusion import measure_colocated

    with open_llm(beside, EngineOptions(threads)) as other:
        cost = measure_colocated(llm, bench, other)
    print(f"{cost.requests} decodes of {beside} beside as many diffusing requests keep {cost.share:.0%} of their speed")
    return {"beside": asdict(cost) | {"share": cost.share}}
