"""What requests are told that no answer has begun for when the drain deadline passes, whatever they wait for."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.edge_client import until
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model

PASS_S = 0.3  # added to every pass of the chat model
SHEET = "a mill grinds grain into flour for bread and " * 24  # the encoder's whole context
DELAY_S, TIMEOUT_S = 0.2, 1.0


def server(folder: Path) -> ServerProcess:
    return ServerProcess(
        *("--model", model_path(SMOLLM2), "--model", model_path(MINILM), "--context", "1024"),
        *("--drain-delay", str(DELAY_S), "--drain-timeout", str(TIMEOUT_S)),
        env={"KVARN_HOME": str(folder)},
        module="tests.server.faulty",
    )


def upload(process: ServerProcess) -> str:
    """A body that never ends."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", process.port), timeout=60) as slow:
        slow.sendall((head + 'content-length: 1000\r\n\r\n{"model": ').encode())
        reply = b""
        while part := slow.recv(65536):
            reply += part
    return f"{int(reply.split()[1])} {reply.decode()}"


def posting(path: str, **body: object) -> Callable[[ServerProcess], str]:
    def post(process: ServerProcess) -> str:
        with process.client() as client:
            response = client.post(path, json=body)
        return f"{response.status_code} {response.text}"

    return post


def getting(path: str) -> Callable[[ServerProcess], str]:
    def get(process: ServerProcess) -> str:
        with process.client() as client:
            response = client.get(path)
        return f"{response.status_code} {response.text}"

    return get


def dropping(process: ServerProcess) -> str:
    with process.client() as client:
        response = client.delete("/v1/collections/idle")
    return f"{response.status_code} {response.text}"


embed = posting("/v1/embeddings", model=MINILM, input="flour")
PAGES = [{"id": str(number), "text": f"{number}: {SHEET}"} for number in range(400)]
WAITING = {
    "for a body": upload,
    "for a load": embed,
    "for embeddings": posting("/v1/embeddings", model=MINILM, input=[SHEET] * 1000),
    "for a reranking": posting("/rerank", model=SMOLLM2, query="flour?", documents=["a mill"] * 200),
    "for an index": posting("/v1/collections/mills/documents", documents=PAGES),
}
WAITING_FOR_A_THREAD = {
    "to list collections": getting("/v1/collections"),
    "to see a collection": getting("/v1/collections/mills"),
    "to open a collection": getting("/v1/collections/other"),
    "to begin a collection": posting("/v1/collections", name="more"),
    "to drop a collection": dropping,
    "to list documents": getting("/v1/collections/mills/documents"),
    "to delete documents": posting("/v1/collections/mills/documents/delete", ids=["1"]),
    "to search": posting("/v1/collections/mills/search", query="flour"),
    "to read the description": getting("/openapi.json"),
}


@pytest.mark.parametrize("what", WAITING)
def test_whoever_waits_at_the_deadline_is_told_then_and_the_process_ends(
    what: str, tmp_path: Path, patience: float
) -> None:
    with server(tmp_path) as process, ThreadPoolExecutor(1) as thread, process.client() as probe:
        probe.post(f"/fault/slow?seconds={PASS_S}")
        if what == "for a load":
            probe.post("/fault/slow-load?seconds=60")
        else:
            assert embed(process).startswith("200")
            assert probe.post("/v1/collections", json={"name": "mills"}).status_code == 200
        asked = thread.submit(WAITING[what], process)
        until(lambda: probe.get("/fault/state").json()["http_requests"] == 1)
        time.sleep(0.3)
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        told = asked.result(60)
        told_s = time.monotonic() - began
        code = process.process.wait(60)
        ended_s = time.monotonic() - began
    assert told.startswith("503")
    assert "shutting_down" in told
    assert code == 0
    assert DELAY_S + TIMEOUT_S - 0.05 <= told_s < DELAY_S + TIMEOUT_S + 0.5 * patience
    assert ended_s < DELAY_S + TIMEOUT_S + 1.5 * patience


def test_whoever_waits_for_a_thread_at_the_deadline_is_told_then(tmp_path: Path, patience: float) -> None:
    with server(tmp_path) as process, ThreadPoolExecutor(16) as threads, process.client() as probe:
        assert embed(process).startswith("200")
        for name in ("mills", "idle"):
            assert probe.post("/v1/collections", json={"name": name}).status_code == 200
        probe.post("/fault/full-threads?seconds=20")
        asked = {what: threads.submit(ask, process) for what, ask in WAITING_FOR_A_THREAD.items()}
        until(lambda: probe.get("/fault/state").json()["http_requests"] == len(asked))
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        told = {what: one.result(60) for what, one in asked.items()}
        told_s = time.monotonic() - began
        code = process.process.wait(60)
    assert {what: words for what, words in told.items() if not words.startswith("503 ")} == {}
    assert all("shutting_down" in words for words in told.values())
    assert code == 0
    assert DELAY_S + TIMEOUT_S - 0.05 <= told_s < DELAY_S + TIMEOUT_S + 0.5 * patience
