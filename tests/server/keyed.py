"""A server with API keys of several tiers, shared by the tests of auth, limits, metrics and tenancy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from kvarn.server.access.keyfile import KeyEntry, draw_key, editing, write_keys
from tests.chat_model import write_chat_model
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path

# Every tier that a test uses up has its own key; the others are never full.
CONFIG = """
[tiers.free]
requests_per_min = 100000
tokens_per_min = 100000000
concurrency = 16

[tiers.pro]
requests_per_min = 100000
tokens_per_min = 100000000

[tiers.few_requests]
requests_per_min = 3

[tiers.few_tokens]
tokens_per_min = 120

[tiers.frugal]
requests_per_min = 100000
tokens_per_min = 60000
concurrency = 4

[tiers.few_bytes]
storage_bytes = 3000000

[tiers.one]
concurrency = 1
"""
# name: (tier, group)
KEYS = {
    "alice": ("pro", "team-a"),
    "anna": ("pro", "team-a"),
    "bert": ("pro", "team-b"),
    "boss": ("enterprise", "boss"),
    "fred": ("free", "fred"),
    "few_requests": ("few_requests", "few"),
    "few_tokens": ("few_tokens", "few"),
    "hinted": ("few_tokens", "few"),
    "few_tokens_stream": ("few_tokens", "few"),
    "open_ended": ("few_tokens", "few"),
    "streamer": ("few_tokens", "few"),
    "long_winded": ("few_tokens", "few"),
    "one": ("one", "one"),
    "frugal": ("frugal", "fred"),
    "hoarder": ("few_bytes", "hoarder"),
    "reranker": ("few_tokens", "team-a"),
    "embedder": ("few_tokens", "few"),
    "collector": ("few_tokens", "few"),
    "reader": ("few_requests", "few"),
    "revoked": ("pro", "gone"),
    "expired": ("pro", "gone"),
}
TINY_KEYS = {"fred": "free", "pia": "pro", "boss": "enterprise"}


@dataclass(frozen=True, slots=True)
class KeyedServer:
    """The process, its key file, and the keys that only their owners know."""

    process: ServerProcess
    file: Path
    keys: Mapping[str, str]

    @property
    def url(self) -> str:
        return self.process.url

    def client(self, name: str | None) -> httpx.Client:
        """A client with the key of that name; None: without a key."""
        headers = {} if name is None else {"authorization": f"Bearer {self.keys[name]}"}
        return self.process.client(headers=headers)

    def chat(self, name: str, text: str, **fields: Any) -> httpx.Response:
        """One greedy answer of a few tokens."""
        with self.client(name) as client:
            return client.post("/v1/chat/completions", json=chat_body(text, **fields))

    def add(self, name: str, tier: str) -> str:
        """Add a key while the server runs."""
        key, entry = draw_key(name, tier)
        with editing(self.file) as entries:
            entries.append(entry)
        return key

    def remove(self, name: str) -> None:
        with editing(self.file) as entries:
            entries[:] = [entry for entry in entries if entry.name != name]


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": SMOLLM2, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def completion_body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": SMOLLM2, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def running(folder: Path, *arguments: str, settings: str = "") -> Iterator[KeyedServer]:
    """Start the server with its keys in a folder; settings: what its file says beside the tiers."""
    drawn = {name: draw_key(name, tier, group) for name, (tier, group) in KEYS.items()}
    file = folder / "keys.toml"
    write_keys(file, [_changed(entry) for _, entry in drawn.values()])
    with ServerProcess(
        *("--model", model_path(SMOLLM2), "--model", model_path(MINILM), "--context", "2048"),
        *arguments,
        config=settings + CONFIG,
        keys=file,
        env={"KVARN_HOME": str(folder)},
        module="tests.server.faulty",
    ) as process:
        yield KeyedServer(process, file, {name: key for name, (key, _) in drawn.items()})


@contextmanager
def tiny_keyed(folder: Path, *arguments: str, config: str = "") -> Iterator[KeyedServer]:
    """A server of a tiny random model, tiny.gguf, with one key of each default tier: fred, pia and boss."""
    drawn = {name: draw_key(name, tier) for name, tier in TINY_KEYS.items()}
    file = folder / "keys.toml"
    write_keys(file, [entry for _, entry in drawn.values()])
    model = write_chat_model(folder / "tiny.gguf")
    with ServerProcess("--model", model, *arguments, config=config, keys=file, module="tests.server.faulty") as process:
        yield KeyedServer(process, file, {name: key for name, (key, _) in drawn.items()})


def _changed(entry: KeyEntry) -> KeyEntry:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    changes = {"revoked": {"revoked": yesterday}, "expired": {"expires": yesterday}}
    return replace(entry, **changes.get(entry.name, {}))
