"""The processes of `kvarn batch --workers`: one that stands still, without ending, costs no answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.batches.workers import pool as pools
from kvarn.server.process.settings import make_config
from tests.chat_model import write_chat_model

PROMPT = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_a_worker_that_stands_still_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 4.0)
    config = make_config({"models": [f"tiny={write_chat_model(tmp_path / 'tiny.gguf')}"]})
    body = json.dumps(PROMPT).encode()

    async def run() -> list[str]:
        workers = pools.WorkerPool(pools.worker_configs(config, 2))
        await workers.start()
        try:
            before = await asyncio.gather(*(workers.ask(ANONYMOUS, "/v1/completions", body) for _ in range(4)))
            stopped = workers._workers[0]._process
            assert stopped is not None
            os.kill(stopped.pid, signal.SIGSTOP)
            after = await asyncio.gather(*(workers.ask(ANONYMOUS, "/v1/completions", body) for _ in range(4)))
            assert await asyncio.to_thread(stopped.wait, 10) == -signal.SIGKILL
            return [json.loads(one.body)["choices"][0]["text"] for one in (*before, *after)]
        finally:
            await workers.close()

    texts = asyncio.run(asyncio.wait_for(run(), 120))
    assert len(texts) == 8
    assert len(set(texts)) == 1
    assert "has said nothing for 4 s" in caplog.text
