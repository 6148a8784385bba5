"""A server whose model is on several ranks: one that loses a worker says so, ends, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.chat_model import write_chat_model
from tests.children import child_ids
from tests.server.process import ServerProcess

pytest.importorskip("torch")
WORKER = "kvarn.backends.torch.parallel.worker"


def test_a_lost_worker_takes_readiness_away_and_ends_the_server(tmp_path: Path, patience: float) -> None:
    path = write_chat_model(tmp_path / "tiny")
    ranks = ("--backend", "torch", "--device", "cpu", "--tensor-parallel", "2", "--threads", "1")
    with ServerProcess("--model", path, "--context", "512", *ranks, is_patient=False) as server:
        (worker,) = child_ids(WORKER, server.pid)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
        with server.client() as http:
            assert http.get("/health/ready").status_code == 200
            assert http.post("/v1/completions", json=body).status_code == 200
            os.kill(worker, signal.SIGKILL)
            assert _fails(http, body)
            _until_not_ready(http, time.monotonic() + 10 * patience)
        assert server.process.wait(10 * patience) not in (0, None)
        assert f"worker 1 of 2 ranks (process {worker}) was killed by SIGKILL" in server.log
    assert not Path(f"/proc/{worker}").exists()


def _fails(http: httpx.Client, body: dict[str, object]) -> bool:
    try:
        return http.post("/v1/completions", json=body).status_code >= 500
    except httpx.TransportError:
        return True


def _until_not_ready(http: httpx.Client, ends_at: float) -> None:
    """Ask until the answer is no; a closed port is as good."""
    while time.monotonic() < ends_at:
        try:
            if http.get("/health/ready").status_code == 503:
                return
        except httpx.TransportError:
            return
        time.sleep(0.05)
    raise AssertionError("/health/ready stayed 200")
