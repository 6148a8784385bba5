"""`kvarn bench serve`: load on a server. A table for people, and one line of JSON, last, for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvarn.cli.terminal.options import ApiKey
from kvarn.cli.terminal.text import printable

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 64
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES = (
    ("first token", "first_token_ms"),
    ("between events", "inter_token_ms"),
    ("per token", "token_time_ms"),
    ("whole answer", "request_ms"),
)


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """How many requests are sent, and when."""

    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Requests at once.")] = 8
    requests: Annotated[int | None, typer.Option("--requests", "-r", help="Requests in all. [default: 64]")] = None
    seconds: Annotated[float | None, typer.Option("--seconds", help="Or: start requests for so long.")] = None
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests started per second. [default: the next as soon as one has ended]"),
    ] = None

    @property
    def num_requests(self) -> int | None:
        """The default holds where --seconds does not bound the run."""
        return DEFAULT_REQUESTS if self.requests is None and self.seconds is None else self.requests


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Lengths of prompts and answers."""

    shared_prefix: Annotated[int, typer.Option("--shared-prefix", help="Tokens all prompts begin with.")] = 0
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt after those.")] = 64
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.")] = 64
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers always have --max-tokens.")] = False


def bench_serve(
    *,
    url: Annotated[str, typer.Option("--url", help="Base URL of any OpenAI-compatible server.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As the server calls it. [default: the first it lists]")
    ] = None,
    arrivals: ArrivalOptions,
    prompts: PromptOptions,
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
        concurrency=arrivals.concurrency,
        num_requests=arrivals.num_requests,
        seconds=arrivals.seconds,
        rate=arrivals.rate,
        shared_prefix=prompts.shared_prefix,
        prompt_tokens=prompts.prompt_tokens,
        max_tokens=prompts.max_tokens,
        ignores_end=prompts.ignore_eos,
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
