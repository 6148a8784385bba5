"""Schemas that take long to compile hold up nobody but the key that sends them, and end with it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.children import child_ids
from tests.server.edge_client import until
from tests.server.keyed import KeyedServer, tiny_keyed

CHILD = "grammar_sandbox_child.py"
NUM_ATTACKS = 4  # the answers at once of a free key
numbers = itertools.count()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    with tiny_keyed(folder) as server:
        yield server


def ask(server: KeyedServer, name: str, schema: dict[str, Any], **options: Any) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny.gguf", "messages": messages, "max_tokens": 2, "response_format": form}
    with server.client(name) as client:
        return client.post("/v1/chat/completions", json=body, **options)


def hostile() -> dict[str, Any]:
    """Seconds of work, each time a schema that nobody has seen."""
    return {"type": "integer", "multipleOf": 10_000_019 + 2 * next(numbers)}


def ordinary() -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{next(numbers)}": {"type": "integer"}}}


def num_compiling(server: KeyedServer) -> int:
    return len(child_ids(CHILD, server.process.pid))


def attacks(server: KeyedServer, name: str, done: list[int], **options: Any) -> list[threading.Thread]:
    def attack() -> None:
        done.append(ask(server, name, hostile(), **options).status_code)

    threads = [threading.Thread(target=attack) for _ in range(NUM_ATTACKS)]
    for thread in threads:
        thread.start()
    return threads


@dataclass
class Attack:
    """What became of one attack, and of those who asked meanwhile."""

    done: list[int] = field(default_factory=list)
    most_compiling: int = 0
    num_done_before: dict[str, int] = field(default_factory=dict)  # by who asked: attacks that were over when answered
    statuses: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def attack(tiny: KeyedServer) -> Attack:
    """Seconds of work from one key; meanwhile a better tier, and another key of its own tier, ask for a little."""
    tiny = KeyedServer(tiny.process, tiny.file, {**tiny.keys, "bob": tiny.add("bob", "free")})
    until(lambda: ask(tiny, "bob", {"type": "object"}).status_code == 200)
    told = Attack()
    threads = attacks(tiny, "fred", told.done)
    until(lambda: num_compiling(tiny) > 0)
    for asker in ("pia", "bob"):
        told.statuses[asker] = ask(tiny, asker, ordinary()).status_code
        told.num_done_before[asker] = len(told.done)
    while any(thread.is_alive() for thread in threads):
        told.most_compiling = max(told.most_compiling, num_compiling(tiny))
        threads[0].join(0.02)
    return told


@pytest.mark.parametrize("asker", ["pia", "bob"])
def test_a_schema_does_not_wait_for_those_of_another_key(attack: Attack, asker: str) -> None:
    assert attack.statuses[asker] == 200
    assert attack.num_done_before[asker] <= 1
    assert attack.done == [400] * NUM_ATTACKS


def test_a_key_compiles_one_schema_at_a_time(attack: Attack) -> None:
    assert attack.most_compiling == 1


def test_a_schema_that_was_refused_is_not_compiled_again_and_costs_its_key_once(tiny: KeyedServer) -> None:
    schema = hostile()
    first, again = ask(tiny, "pia", schema), ask(tiny, "pia", schema)
    assert first.status_code == again.status_code == 400
    assert first.json()["error"]["code"] == "constraint_error"
    assert first.json() == again.json()
    assert first.elapsed > 4 * again.elapsed
    left = int(ask(tiny, "pia", {"type": "object"}).headers["x-ratelimit-remaining-tokens"])
    assert 1_000_000 - 2 * 1000 < left <= 1_000_000 - 1000


def test_compiling_ends_when_its_caller_leaves(tiny: KeyedServer) -> None:
    whole_s = ask(tiny, "boss", hostile()).elapsed.total_seconds()
    with pytest.raises(httpx.ReadTimeout):
        ask(tiny, "boss", hostile(), timeout=0.25 * whole_s)
    left_at = time.monotonic()
    until(lambda: num_compiling(tiny) == 0)
    assert time.monotonic() - left_at < 0.5 * whole_s
