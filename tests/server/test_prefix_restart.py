"""A server killed and started again: prefixes come from disk, answers stay the same, and tenants stay apart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvarn.server.access.keyfile import draw_key, write_keys
from tests.chat_model import write_chat_model
from tests.forked import told_by_kvarn
from tests.server.asking import CHAT, answer
from tests.server.process import MINILM, ServerProcess, model_path
from tests.server.scraping import read, scrape

SECRET = "the mill of Ystad ground its last rye in 1962"
LONG = " ".join(f"Clause {number}: {SECRET}." for number in range(12))
BLOCK_BYTES = 2 * 2 * 2 * 32 * 2 * 16  # layers, K and V, heads, dimensions, f16, tokens
BODY = {
    "model": "tiny.gguf",
    "messages": [{"role": "user", "content": LONG}],
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": True,
}
DOCUMENTS = [{"id": "mill", "text": LONG}]
ASKED = BODY | {"messages": [{"role": "user", "content": "When?"}], "retrieval": {"collection": "mills", "k": 1}}


class Mill:
    """A server whose home, keys and prefix cache outlive its process."""

    def __init__(self, folder: Path) -> None:
        self.prefixes = folder / "prefixes"
        drawn = {name: draw_key(name, "pro", group) for name, group in (("alice", "mills"), ("bert", "rivals"))}
        self.tokens = {name: key for name, (key, _) in drawn.items()}
        self._keys, self._home = folder / "keys.toml", {"KVARN_HOME": str(folder)}
        write_keys(self._keys, [entry for _, entry in drawn.values()])
        self._model = write_chat_model(folder / "tiny.gguf")

    @contextmanager
    def running(self, *arguments: str) -> Iterator[ServerProcess]:
        models = "--model", self._model, "--model", model_path(MINILM)
        options = "--prefix-cache-dir", str(self.prefixes), *arguments
        with ServerProcess(*models, *options, keys=self._keys, env=self._home) as server:
            yield server

    def client(self, server: ServerProcess, name: str) -> httpx.Client:
        return server.client(headers={"authorization": f"Bearer {self.tokens[name]}"})


def cached(found: dict[str, Any]) -> int:
    tokens: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def until_written(mill: Mill, server: ServerProcess, num_bytes: int) -> None:
    limit, written = time.monotonic() + 60, 0.0
    headers = {"authorization": f"Bearer {mill.tokens['alice']}"}
    while written < num_bytes:
        assert time.monotonic() < limit, f"{written} of {num_bytes} bytes were written"
        time.sleep(0.1)
        written = read(scrape(server, headers=headers), "kvarn_prefix_disk_written_bytes_total")


@pytest.mark.model
def test_after_kill_and_restart_prefixes_and_hot_documents_come_from_disk(tmp_path: Path) -> None:
    mill = Mill(tmp_path)
    with mill.running() as server, mill.client(server, "alice") as client:
        answer(client, "/v1/collections", {"name": "mills"})
        answer(client, "/v1/collections/mills/documents", {"documents": DOCUMENTS})
        cold, warm, _ = (answer(client, CHAT, BODY) for _ in range(3))
        asked = [answer(client, CHAT, ASKED) for _ in range(2)][1]
        assert cached(cold) == 0
        assert cached(warm) > 500
        until_written(mill, server, (cached(warm) + cached(asked)) // 16 * BLOCK_BYTES)
        server.process.kill()
        server.process.wait()
    with mill.running() as server, mill.client(server, "alice") as client, mill.client(server, "bert") as other:
        restored, again = answer(client, CHAT, BODY), answer(client, CHAT, ASKED)
        foreign = answer(other, CHAT, BODY)
        headers = {"authorization": f"Bearer {mill.tokens['alice']}"}
        hits = read(scrape(server, headers=headers), "kvarn_external_prefix_cache_hits_total")
        told = server.log
    assert cached(restored) == cached(warm)
    assert restored["choices"] == cold["choices"] == warm["choices"] == foreign["choices"]
    assert cached(again) == cached(asked)
    assert again["choices"] == asked["choices"]
    assert cached(foreign) == 0
    assert hits >= cached(restored)
    assert SECRET not in told
    _check_folder(mill.prefixes)


def _check_folder(folder: Path) -> None:
    """What is on disk, and that it can be verified and cleared."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() + path.name.encode() for path in files)
    assert len(content) > 100_000
    assert not [word for word in ("of Ystad", "rye in", "alice", "rivals", "Clause") if word.encode() in content]
    options = "--prefix-cache-dir", str(folder)
    (listed,) = json.loads(told_by_kvarn("cache", "ls", "--json", *options).stdout)
    assert (listed["model"], listed["num_damaged"], listed["problems"]) == ("tiny chat", 0, [])
    assert told_by_kvarn("cache", "verify", *options).returncode == 0
    assert "cleared, 0 bytes freed" in told_by_kvarn("cache", "clear", "--tenant", "rivals", *options).stdout
    assert told_by_kvarn("cache", "ls", *options).stdout.splitlines()[1].startswith("tiny chat")
    assert "freed" in told_by_kvarn("cache", "clear", "--tenant", "mills", *options).stdout
    assert told_by_kvarn("cache", "ls", *options).stdout.startswith("no prefixes in")
    told_by_kvarn("cache", "clear", *options)
    assert {path.name for path in folder.rglob("*")} == {"lock"}


def test_a_folder_that_cannot_be_made_is_one_line_and_no_cache_is_none(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    with ServerProcess("--model", model, "--prefix-cache-dir", tmp_path / "file" / "x") as server:
        with server.client() as client:
            answer(client, CHAT, BODY)
        told = server.log
    assert told.count("prefix cache on disk is off") == 1
    home = {"KVARN_HOME": str(tmp_path / "home"), "KVARN_SERVER_ENGINE_PREFIX_CACHE_DIR": str(tmp_path / "prefixes")}
    with ServerProcess("--model", model, "--no-prefix-cache", env=home) as server, server.client() as client:
        assert [cached(answer(client, CHAT, BODY)) > 0 for _ in range(2)] == [False, True]
    assert not (tmp_path / "prefixes").exists()
