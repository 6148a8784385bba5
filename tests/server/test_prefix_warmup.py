"""Prompts of frequent queries computed ahead: no loaded model is evicted for it, and a failure is one log line."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvarn.config import EngineConfig
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.chat.conversation import Conversation
from kvarn.server.collections import prefix_warmup
from kvarn.server.collections.prefix_warmup import MAX_CHATS, FrequentChat
from kvarn.server.models.catalog import MemoryRoom, plan_load
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig
from kvarn.server.state import ServerState
from kvarn.types import SamplingParams
from tests.chat_model import write_chat_model
from tests.server.process import MINILM, ServerProcess, model_path

CHATS = ("a.gguf", "b.gguf")
QUESTION = "is my secret illness contagious"
ANOTHER_VERSION = -1  # of the collection: the prompt is due


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two chat models and an empty home; the warm-up polls all the time."""
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(prefix_warmup, "POLL_INTERVAL_S", 0.02)
    for name in CHATS:
        write_chat_model(tmp_path / name)
    return tmp_path


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)  # pytest sees the fixtures of the test
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@asynccontextmanager
async def started(home: Path, **settings: Any) -> AsyncIterator[ServerState]:
    """All of a server but its socket, with one collection."""
    models = (str(home / CHATS[0]), str(model_path(MINILM)), str(home / CHATS[1]))
    state = make_state(ServerConfig(models=models, pinned=(MINILM,), **settings))
    await state.models.start()
    state.lifecycle.become_ready()
    await state.collections.create("", "things", Chunking())
    try:
        yield state
    finally:
        for part in (state.prefix_warmup, state.collections, state.models):
            await part.close()


def frequent_chat(question: str = QUESTION, **changes: Any) -> FrequentChat:
    chat = Conversation([{"role": "user", "content": question}], SamplingParams(max_tokens=4))
    frequent = FrequentChat(ANONYMOUS, "", CHATS[0], "things", question, chat, {"k": 1})
    return replace(frequent, **changes)


def num_warmed(state: ServerState) -> float:
    lines = state.metrics.render().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kvarn_retrieval_primed_total"))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.02)


@pytest.mark.model
@in_a_loop
async def test_a_chat_dropped_while_it_waits_stops_nothing_and_leaves_nothing(home: Path) -> None:
    async with started(home) as state:
        async with state.collections._changing:  # the warm-up waits for the collection of the first query
            state.prefix_warmup.add(frequent_chat(), ANOTHER_VERSION)
            await asyncio.sleep(0.2)
            for number in range(MAX_CHATS):
                state.prefix_warmup.add(frequent_chat(f"question {number}"), ANOTHER_VERSION)
        await until(lambda: num_warmed(state) >= 3)
        assert len(state.prefix_warmup._chats) == MAX_CHATS
        assert QUESTION not in {key[-1] for key in state.prefix_warmup._chats}


@pytest.mark.model
@in_a_loop
async def test_a_primed_prompt_is_kept_and_not_primed_again_at_once(home: Path) -> None:
    async with started(home) as state:
        async with state.collections.use("", "things") as collection:
            version = collection.version
        state.prefix_warmup.add(frequent_chat(), version)
        await until(lambda: num_warmed(state) == 1)
        async with state.models.use(CHATS[0]) as served:
            pool = served.llm.llm._model.engine.kv.groups[0].pool
            assert 0 < pool.num_kept == len(pool.cached_ids)
        state.prefix_warmup.add(frequent_chat(), version)  # it was asked again
        await asyncio.sleep(0.2)
        assert num_warmed(state) == 1


@pytest.mark.model
@in_a_loop
async def test_an_unexpected_error_is_logged_by_its_type_only_and_the_next_chat_is_warmed(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(home) as state:
        with caplog.at_level(logging.INFO):
            state.prefix_warmup.add(frequent_chat(options={QUESTION: 1}), ANOTHER_VERSION)
            await until(lambda: not state.prefix_warmup._chats)
        assert "forgotten: TypeError" in caplog.text
        assert QUESTION not in caplog.text
        state.prefix_warmup.add(frequent_chat(), ANOTHER_VERSION)
        await until(lambda: num_warmed(state) == 1)


@pytest.mark.model
@in_a_loop
async def test_no_model_is_loaded_or_evicted_for_a_warm_up(home: Path) -> None:
    room = MemoryRoom(1 << 40, 1 << 40, True)
    sizes = [plan_load(name, str(home / name), EngineConfig(), room).entry.needed_bytes for name in CHATS]
    minilm = plan_load(MINILM, str(model_path(MINILM)), EngineConfig(), room).entry.needed_bytes
    async with started(home, memory_bytes=minilm + max(sizes) * 3 // 2) as state:
        async with state.models.use(CHATS[1]):
            pass
        assert not state.models.is_loaded(CHATS[0])
        state.prefix_warmup.add(frequent_chat(), ANOTHER_VERSION)
        await asyncio.sleep(0.5)
        assert state.models.is_loaded(CHATS[1])
        assert (num_warmed(state), len(state.prefix_warmup._chats)) == (0, 1)
        async with state.models.use(CHATS[0]):  # a request loads it: now its prompts may be warmed
            pass
        await until(lambda: num_warmed(state) == 1)


def test_a_part_that_fails_to_close_changes_neither_the_others_nor_the_exit_code(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / CHATS[0])
    home = {"KVARN_HOME": str(tmp_path), "KVARN_SERVER_DRAIN_DELAY_S": "0"}
    with ServerProcess("--model", model, env=home, module="tests.server.faulty") as server:
        with server.client() as client:
            client.post("/fault/close").raise_for_status()
        assert server.stop(signal.SIGTERM) == 0
        told = server.log
    assert told.count("a part was not closed cleanly") == 2
    assert "injected" not in told
    assert "internal error" not in told
