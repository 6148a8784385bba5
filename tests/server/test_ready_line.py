"""The line that says a server is ready: told if somebody takes it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.chat_model import write_chat_model


@pytest.mark.parametrize("stdout", ["full", "closed"])
def test_a_server_whose_ready_line_nobody_takes_serves_all_the_same(
    stdout: str, tmp_path: Path, patience: float
) -> None:
    port, model = _free_port(), write_chat_model(tmp_path / "a.gguf")
    command = [sys.executable, "-m", "kvarn.cli.main", "serve", "--port", str(port), "--model", str(model)]
    if stdout == "full":
        if not os.path.exists("/dev/full"):
            pytest.skip("nothing here is always full")
        taker = open("/dev/full", "wb")  # noqa: SIM115 - closed below
    else:
        reading, writing = os.pipe()
        os.close(reading)
        taker = open(writing, "wb")  # noqa: SIM115
    with taker, (tmp_path / "log").open("wb") as log:
        env = {**os.environ, "KVARN_SERVER_DRAIN_DELAY_S": "0"}
        process = subprocess.Popen([*command, "--drain-timeout", "1"], stdout=taker, stderr=log, env=env)
    try:
        ends_at = time.monotonic() + 60 * patience
        while not _is_ready(port) and process.poll() is None and time.monotonic() < ends_at:
            time.sleep(0.05)
        body = {"model": "a.gguf", "prompt": "One", "max_tokens": 2}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(20 * patience) == 0
    finally:
        process.kill()
    assert "nothing can be written to stdout" in (tmp_path / "log").read_text()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
