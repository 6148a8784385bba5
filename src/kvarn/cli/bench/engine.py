"""`kvarn bench engine`: what the engine costs on top of its backend. A table, and one line of JSON, last."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import EngineOptions, Model, Threads, open_llm
from kvarn.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvarn.bench.engine import EngineCost

CONCURRENCY = (1, 8, 32)
HEADINGS = ("requests", "step", "backend", "overhead", "share", "tokens/s", "bare loop", "of bare")


def bench_engine(
    *,
    model: Model = DEFAULT_MODEL,
    requests: Annotated[
        list[int] | None,
        typer.Option("--requests", "-r", min=1, max=1024, help="Concurrent requests. [default: 1 8 32]"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, max=10_000, help="Decode steps of each round.")] = 48,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds, engine and bare loop in turn.")] = 3,
    threads: Threads = None,
) -> None:
    """What scheduling and Python cost per step, against the same batch driven straight into the backend."""
    from kvarn.bench.engine import kv_bytes, measure
    from kvarn.config import is_offline
    from kvarn.hub import resolve

    counts = requests or list(CONCURRENCY)
    room = kv_bytes(resolve(model, offline=is_offline()), max(counts), steps)
    with open_llm(model, EngineOptions(threads), max(counts), room) as llm:
        print(("{:>10}" * len(HEADINGS)).format(*HEADINGS))
        costs = []
        for count in counts:
            costs.append(measure(llm.client, llm.spec.vocab_size, count, steps, rounds))
            print(_table_row(costs[-1]), flush=True)
        report = {
            "bench": "engine",
            "model": llm.spec.name,
            "backend": llm.backend_name,
            "runs": list(map(_as_json, costs)),
        }
    print(json.dumps(report))


def _table_row(cost: EngineCost) -> str:
    times = "".join(f"{value:>7.2f} ms" for value in (cost.step_ms, cost.backend_ms, cost.overhead_ms))
    speeds = f"{cost.tokens_per_s:>10.1f}{cost.straight_tokens_per_s:>10.1f}"
    return f"{cost.requests:>10}{times}{cost.overhead_share:>10.1%}{speeds}{cost.throughput_share:>10.1%}"


def _as_json(cost: EngineCost) -> dict[str, Any]:
    derived = ("overhead_ms", "overhead_share", "tokens_per_s", "straight_tokens_per_s", "throughput_share")
    names = [f.name for f in fields(cost)] + list(derived)
    return {name: round(getattr(cost, name), 5) for name in names}
