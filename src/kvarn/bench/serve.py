"""A bounded load generator for OpenAI-compatible servers: streams at once, duration and request rate.

    jobs (numbers, start times) ──> workers, one connection each ──> Exchange ──> LoadStats ──> summary

Prompts are made of common words, about one token each; the server's usage gives their actual token counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarn.bench.connection import Address, Connection, Exchange, error_text, first_model, request_bytes
from kvarn.errors import ConfigError, RequestError

MAX_BACK_OFF_S = 5.0  # after a refusal, whatever Retry-After says
PERCENTILES = (50, 90, 95, 99)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Load:
    """The load put on a server. Ends after num_requests or seconds, whichever is given."""

    url: str
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    concurrency: int = 8
    num_requests: int | None = None
    seconds: float | None = None
    rate: float | None = None  # requests started per second; None: the next as soon as one has ended
    shared_prefix: int = 0  # tokens that all prompts begin with
    prompt_tokens: int = 64  # tokens after those, different in every prompt
    prompt_ids: tuple[tuple[int, ...], ...] = ()  # continue these, in turn, instead of chats made of words
    max_tokens: int = 64
    temperature: float = 0.7
    ignores_end: bool = False  # answers always have max_tokens; an extension that not every server knows
    timeout_s: float = 600.0
    seed: int = 1

    def __post_init__(self) -> None:
        _within("concurrency", self.concurrency, 1, 4096)
        _within("shared-prefix", self.shared_prefix, 0, 1_000_000)
        _within("prompt-tokens", self.prompt_tokens, 1, 1_000_000)
        _within("max-tokens", self.max_tokens, 1, 1_000_000)
        _within("timeout", self.timeout_s, 0.1, 86_400)
        if (self.num_requests is None) == (self.seconds is None):
            raise ConfigError("give either --requests or --seconds")
        if self.num_requests is not None:
            _within("requests", self.num_requests, 1, 1_000_000)
        if self.seconds is not None:
            _within("seconds", self.seconds, 0.1, 86_400)
        if self.rate is not None:
            _within("rate", self.rate, 0.001, 100_000)
        Address.of(self.url)


@dataclass(slots=True)
class LoadStats:
    """Counts and latencies of the requests so far."""

    num_ok: int = 0
    refused: int = 0  # 429
    failures: Counter[str] = field(default_factory=Counter)  # by status or kind of error
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_s: list[float] = field(default_factory=list)  # time to the first token, in seconds
    gap_s: list[float] = field(default_factory=list)  # between two events of one stream
    token_s: list[float] = field(default_factory=list)  # per answer: mean time per token after the first
    total_s: list[float] = field(default_factory=list)
    late_s: float = 0.0  # the longest delay of a start after its scheduled time
    example: str | None = None  # of a failure

    def take(self, exchange: Exchange) -> None:
        """Count one response."""
        if exchange.status != 200:
            self._count_refusal(exchange)
        elif exchange.error is not None:
            self.fail("error in the stream", exchange.error)
        elif exchange.first_at is None or not exchange.is_done:
            self.fail("incomplete stream", "the stream ended without text or without [DONE]")
        else:
            self._count_answer(exchange, exchange.first_at)

    def fail(self, kind: str, reason: str) -> None:
        self.failures[kind] += 1
        self.example = self.example or f"{kind}: {reason}"

    def _count_refusal(self, exchange: Exchange) -> None:
        try:
            reason = error_text(json.loads(exchange.body))
        except ValueError:
            reason = "the error body is not JSON"
        if exchange.status == 429:
            self.refused += 1
            self.example = self.example or f"429: {reason}"
        else:
            self.fail(f"status {exchange.status}", reason)

    def _count_answer(self, exchange: Exchange, first_at: float) -> None:
        usage = exchange.usage or {}
        num_tokens = int(usage.get("completion_tokens") or exchange.num_events)
        self.num_ok += 1
        self.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self.cached_tokens += int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self.completion_tokens += num_tokens
        self.first_s.append(first_at - exchange.sent_at)
        self.gap_s.extend(exchange.gaps)
        self.total_s.append(exchange.ended_at - exchange.sent_at)
        if num_tokens > 1:
            self.token_s.append((exchange.last_at - first_at) / (num_tokens - 1))


async def run_load(load: Load) -> dict[str, Any]:
    """Put the load on the server and summarise, in milliseconds and tokens per second."""
    address = Address.of(load.url)
    model = load.model or await first_model(address, load.api_key, min(load.timeout_s, 60.0))
    prompts = Prompts(load)
    stats = LoadStats()
    started, cpu_s = time.perf_counter(), time.process_time()
    jobs = _jobs(load, started)

    async def work() -> None:
        connection: Connection | None = None
        for number, start_at in jobs:
            await _sleep_until(start_at)
            if start_at is not None:
                stats.late_s = max(stats.late_s, time.perf_counter() - start_at)
            request = _request(address, load, model, prompts.make(number))
            connection, wait_s = await _send(address, connection, request, load.timeout_s, stats)
            await asyncio.sleep(wait_s)
        if connection is not None:
            connection.close()

    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    wall_s = time.perf_counter() - started
    return summary(load, model, stats, wall_s, time.process_time() - cpu_s)


class Prompts:
    """Prompts by number: the same words for the same number and seed."""

    def __init__(self, load: Load) -> None:
        self._ids = load.prompt_ids
        self._seed = load.seed
        self._num_words = load.prompt_tokens
        self._prefix = random.Random(load.seed).choices(WORDS, k=load.shared_prefix)

    def make(self, number: int) -> str | tuple[int, ...]:
        if self._ids:
            return self._ids[number % len(self._ids)]
        words = random.Random(f"{self._seed} {number}").choices(WORDS, k=self._num_words)
        return " ".join([*self._prefix, *words])


def summary(load: Load, model: str, stats: LoadStats, wall_s: float, cpu_s: float) -> dict[str, Any]:
    """Everything measured, as one JSON object."""
    failed = sum(stats.failures.values())
    return {
        "bench": "serve",
        "model": model,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "shared_prefix": load.shared_prefix,
        "prompt_tokens_asked": load.prompt_tokens,
        "max_tokens": load.max_tokens,
        "requests": stats.num_ok + stats.refused + failed,
        "succeeded": stats.num_ok,
        "refused_429": stats.refused,
        "failed": failed,
        "failures": dict(stats.failures),
        "example": stats.example,
        "seconds": round(wall_s, 3),
        "requests_per_s": round(stats.num_ok / wall_s, 3),
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "tokens_per_s": round(stats.completion_tokens / wall_s, 2),
        "first_token_ms": spread(stats.first_s),
        "inter_token_ms": spread(stats.gap_s),
        "token_time_ms": spread(stats.token_s),
        "request_ms": spread(stats.total_s),
        "late_ms": round(1000 * stats.late_s, 1),
        "client_cpu_s": round(cpu_s, 3),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and maximum, in milliseconds; None without samples."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    found = {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}
    return {name: round(1000 * value, 2) for name, value in found.items()}


async def _send(
    address: Address, connection: Connection | None, request: bytes, timeout_s: float, stats: LoadStats
) -> tuple[Connection | None, float]:
    """Send one request; returns the connection if it can be reused, and how long to wait before the next request."""
    try:
        if connection is None or not connection.is_open:
            connection = await Connection.open(address)
        exchange = await connection.exchange(request, timeout_s)
    except TimeoutError:
        stats.fail("timeout", f"no answer within {timeout_s:g} s")
        return None, 0.0
    except OSError as error:
        stats.fail("connection", str(error) or type(error).__name__)
        return None, 0.1  # back off from a server that is down
    stats.take(exchange)
    if exchange.status in (429, 503):
        retry_s = 1.0 if exchange.retry_after_s is None else exchange.retry_after_s
        return connection, min(retry_s, MAX_BACK_OFF_S)
    return connection, 0.0


def _jobs(load: Load, started: float) -> Iterator[tuple[int, float | None]]:
    """(number, start time) of every request; one iterator shared by all workers, so each is sent once."""
    for number in itertools.count():
        if load.num_requests is not None and number >= load.num_requests:
            return
        start_at = None if load.rate is None else started + number / load.rate
        if load.seconds is not None and max(time.perf_counter(), start_at or 0.0) >= started + load.seconds:
            return
        yield number, start_at


async def _sleep_until(start_at: float | None) -> None:
    if start_at is not None and (wait_s := start_at - time.perf_counter()) > 0:
        await asyncio.sleep(wait_s)


def _request(address: Address, load: Load, model: str, prompt: str | tuple[int, ...]) -> bytes:
    """A chat for text, a plain completion for token ids."""
    prompt_fields: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    path = "/v1/chat/completions"
    if not isinstance(prompt, str):
        prompt_fields, path = {"prompt": prompt}, "/v1/completions"
    body = {
        "model": model,
        **prompt_fields,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return request_bytes(
        address, "POST", path, key=load.api_key, body=body | {"ignore_eos": True} if load.ignores_end else body
    )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{name} is {value:g}; give {low:g} to {high:g}")


def require_success(report: dict[str, Any]) -> None:
    """Raise when nothing was measured at all."""
    if not report["succeeded"]:
        raise RequestError(f"none of {report['requests']} requests succeeded; the first: {report['example']}")
