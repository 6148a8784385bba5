"""`kvarn bench`: measurements on this machine. A table for people, and one line of JSON, last, for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import ApiKey, EngineOptions, Model, Threads, open_llm
from kvarn.cli.terminal.text import printable
from kvarn.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvarn.bench.engine import EngineCost

CONCURRENCY = (1, 8, 32)
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 64
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES = (
    ("first token", "first_token_ms"),
    ("between events", "inter_token_ms"),
    ("per token", "token_time_ms"),
    ("whole answer", "request_ms"),
)
HEADINGS = ("requests", "step", "backend", "overhead", "share", "tokens/s", "bare loop", "of bare")


def bench_engine(
    *,
    model: Model = DEFAULT_MODEL,
    requests: Annotated[
        list[int] | None, typer.Option("--requests", "-r", min=1, max=64, help="Concurrent requests. [default: 1 8 32]")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, max=10_000, help="Decode steps of each round.")] = 48,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds, engine and bare loop in turn.")] = 3,
    threads: Threads = None,
) -> None:
    """What scheduling and Python cost per step, against the same batch driven straight into the backend."""
    from kvarn.bench.engine import measure

    with open_llm(model, EngineOptions(threads)) as llm:
        print(("{:>10}" * len(HEADINGS)).format(*HEADINGS))
        costs = []
        for count in requests or CONCURRENCY:
            costs.append(measure(llm.runner, llm.spec.vocab_size, count, steps, rounds))
            print(_table_row(costs[-1]), flush=True)
        report = {
            "bench": "engine",
            "model": llm.spec.name,
            "backend": llm.backend_name,
            "runs": list(map(_as_json, costs)),
        }
    print(json.dumps(report))


def bench_serve(
    *,
    url: Annotated[str, typer.Option("--url", help="Base URL of any OpenAI-compatible server.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As the server calls it. [default: the first it lists]")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Requests at once.")] = 8,
    requests: Annotated[int | None, typer.Option("--requests", "-r", help="Requests in all. [default: 64]")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Or: start requests for so long.")] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests started per second. [default: the next as soon as one has ended]"),
    ] = None,
    shared_prefix: Annotated[int, typer.Option("--shared-prefix", help="Tokens all prompts begin with.")] = 0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt after those.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers always have --max-tokens.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 600.0,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and answers.")] = 1,
    api_key: ApiKey = None,
) -> None:
    """Load a server with streaming chats: times to first token and between tokens, throughput, failures."""
    import asyncio

    from kvarn.bench.serve import Load, require_success, run_load
    from kvarn.config import client_key

    load = Load(
        url=url,
        model=model,
        api_key=api_key or client_key(),
        concurrency=concurrency,
        num_requests=DEFAULT_REQUESTS if requests is None and seconds is None else requests,
        seconds=seconds,
        rate=rate,
        shared_prefix=shared_prefix,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        ignores_end=ignore_eos,
        timeout_s=timeout,
        seed=seed,
    )
    report = asyncio.run(run_load(load))
    for line in serve_table(report):
        print(line)
    print(json.dumps(report), flush=True)
    require_success(report)


def serve_table(report: dict[str, Any]) -> Iterator[str]:
    """The report as a table for people."""
    yield f"{printable(report['model'])}, {report['concurrency']} at once, {report['seconds']:.1f} s"
    yield f"{report['succeeded']:>10,} answers, {report['refused_429']:,} refused with 429, {report['failed']:,} failed"
    if report["example"]:
        yield f"           {printable(report['example'])}"
    yield f"{report['requests_per_s']:>10.2f} answers/s"
    yield f"{report['tokens_per_s']:>10.1f} tokens/s out, {report['completion_tokens']:,} in all"
    yield f"{report['prompt_tokens']:>10,} tokens in, {report['cached_tokens']:,} of them from the cache"
    yield ("{:<20}" + "{:>10}" * len(STATISTICS)).format("milliseconds", *STATISTICS)
    for title, name in LATENCIES:
        if report[name] is not None:
            yield f"{title:<20}" + "".join(f"{report[name][column]:>10.1f}" for column in STATISTICS)


def _table_row(cost: EngineCost) -> str:
    times = "".join(f"{value:>7.2f} ms" for value in (cost.step_ms, cost.backend_ms, cost.overhead_ms))
    speeds = f"{cost.tokens_per_s:>10.1f}{cost.straight_tokens_per_s:>10.1f}"
    return f"{cost.requests:>10}{times}{cost.overhead_share:>10.1%}{speeds}{cost.throughput_share:>10.1%}"


def _as_json(cost: EngineCost) -> dict[str, Any]:
    derived = ("overhead_ms", "overhead_share", "tokens_per_s", "straight_tokens_per_s", "throughput_share")
    names = [f.name for f in fields(cost)] + list(derived)
    return {name: round(getattr(cost, name), 5) for name in names}
