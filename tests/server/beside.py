"""A neighbour's stream beside whatever a test does, and the server's state before and after."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.asking import CHAT, chat_body
from tests.server.edge_client import Client, Reply, post, until
from tests.server.process import ServerProcess

KEPT = ("http_requests", "generations", "running", "waiting", "blocks_used", "tasks", "files")


@contextmanager
def a_neighbour(server: ServerProcess, alone: str) -> Iterator[None]:
    """A stream runs meanwhile and says what it says alone; afterwards everything is as before."""
    before = state_of(server)
    said: list[str] = []
    has_begun = threading.Event()
    neighbour = threading.Thread(target=lambda: said.append(story(server, has_begun)))
    neighbour.start()
    assert has_begun.wait(60)
    yield
    neighbour.join(60)
    assert said == [alone]
    assert server.process.poll() is None
    until(lambda: state_of(server) == before)


def ask(server: ServerProcess, data: bytes) -> Reply:
    with Client(server.port) as client:
        return client.send(data).reply()


def chat(content: Any = "Name three colours.", *headers: str, **fields: Any) -> bytes:
    return post(CHAT, json.dumps(chat_body(content, **fields)).encode(), *headers)


def story(server: ServerProcess, has_begun: threading.Event | None = None) -> str:
    """What the neighbour hears."""
    with Client(server.port) as client:
        client.send(chat("Tell me a story.", max_tokens=48, ignore_eos=True, stream=True))
        client.socket.recv(1, socket.MSG_PEEK)
        if has_begun is not None:
            has_begun.set()
        reply = client.reply()
    assert reply.status == 200, reply
    events = [line.removeprefix("data: ") for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def state_of(server: ServerProcess) -> list[int]:
    """Needs the routes of tests.server.faulty."""
    state = ask(server, b"GET /fault/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").json
    return [state[name] for name in KEPT]
