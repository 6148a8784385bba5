"""A hot question asked of a server, before and after a flood of other prompts. Knows HTTP and the server's metrics.

The server is a process of its own with SmolLM2 and MiniLM, and a KV cache that the flood fills several times over. The
question is asked until the server has primed its prompt while idle; from then on it is asked in rounds, once before a
flood and once right behind it, before the server is idle again and could prime anew: the metrics are read to be sure.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path

from benchmarks.docstrings import Function

QUESTION = "How do I parse a date in ISO format?"
FLOOD = 40  # prompts ...
FLOOD_WORDS = 900  # ... of more than a thousand tokens each
CLIENTS = 4
KV_TOKENS = 10_240  # a quarter of it may be kept
CONFIG = f"[engine]\ncontext = 2048\nkv_bytes = {KV_TOKENS * 30 * 2 * 3 * 64 * 2}\n"  # SmolLM2-135M, bf16
PRIMED, EVICTED = "kvarn_retrieval_primed_total", "kvarn_evicted_tokens_total"
ASKS = 5  # before the first flood
DEADLINE_S = 120.0


def hot_over_http(folder: Path, functions: Sequence[Function], rounds: int) -> dict[str, Any]:
    """Milliseconds to the first token: cold, primed, and primed after floods."""
    models = [part for name in (SMOLLM2, MINILM) for part in ("--model", str(model_path(name)))]
    env = {"KVARN_HOME": str(folder / "home")}
    with ServerProcess(*models, config=CONFIG, env=env) as server, server.client() as client:
        _index(client, functions)
        _first_token(client, "warm up")
        cold = _first_token(client, QUESTION)
        while _metric(client, PRIMED) < 1:
            _first_token(client, QUESTION)
            time.sleep(1.0)  # idle
        unflooded = [_first_token(client, QUESTION) for _ in range(ASKS)]
        flooded, evicted, primed = [], _metric(client, EVICTED), []
        for number in range(rounds):
            unflooded.append(_first_token(client, QUESTION))
            primed.append(_metric(client, PRIMED))
            _flood(client, number)
            flooded.append(_first_token(client, QUESTION))
            primed[-1] = _metric(client, PRIMED) - primed[-1]
        evicted = _metric(client, EVICTED) - evicted
    if evicted < rounds * KV_TOKENS:
        raise SystemExit(f"the floods evicted {evicted:,.0f} tokens only; this measures nothing")
    return {
        "over HTTP: cold ms": _ms(cold),
        "over HTTP: primed ms, median": _ms(statistics.median(unflooded)),
        f"over HTTP: after {FLOOD} other prompts ms, median of {rounds}": _ms(statistics.median(flooded)),
        "over HTTP: after / before": round(statistics.median(flooded) / statistics.median(unflooded), 2),
        "over HTTP: worst after / before": round(max(flooded) / statistics.median(unflooded), 2),
        "over HTTP: tokens evicted by a flood": round(evicted / rounds),
        "over HTTP: primed anew between a flood and the question": int(sum(primed)),
    }


def _index(client: httpx.Client, functions: Sequence[Function]) -> None:
    client.post("/v1/collections", json={"name": "functions"}).raise_for_status()
    for start in range(0, len(functions), 50):
        documents = [{"text": one.text, "id": one.name, "kind": "code"} for one in functions[start : start + 50]]
        body = {"documents": documents}
        client.post("/v1/collections/functions/documents", json=body, timeout=600.0).raise_for_status()


def _first_token(client: httpx.Client, question: str) -> float:
    """Seconds from the request to the first text of a streamed answer."""
    body = {
        "model": SMOLLM2,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "retrieval": {"collection": "functions", "min_relevance": 0},  # the model answers, whatever was found
    }
    began, first = time.perf_counter(), None
    with client.stream("POST", "/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        for line in response.iter_lines():
            if first is None and line.startswith("data: {") and _has_text(json.loads(line[6:])):
                first = time.perf_counter() - began
    assert first is not None, "the answer has no text"
    return first


def _has_text(event: dict[str, Any]) -> bool:
    return any(choice.get("delta", {}).get("content") for choice in event.get("choices", ()))


def _flood(client: httpx.Client, number: int) -> None:
    """Other prompts, some at once, none of them like another."""

    def ask(index: int) -> None:
        chooser = random.Random(f"{number} {index}")
        words = " ".join(f"{chooser.choice(WORDS)}{chooser.randrange(10)}" for _ in range(FLOOD_WORDS // 2))
        body = {"model": SMOLLM2, "messages": [{"role": "user", "content": words}], "max_tokens": 4}
        client.post("/v1/chat/completions", json=body, timeout=DEADLINE_S).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(FLOOD)))


WORDS = ("mill", "grain", "flour", "stone", "wheel", "river", "bread", "oven", "salt", "water", "star", "lens")


def _metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split(" ")[0].split("{")[0] == name)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
