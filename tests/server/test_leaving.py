"""Clients that leave: work for them ends, and they pay for what was computed, not for the rest."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.edge_client import until
from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, SMOLLM2, ServerProcess
from tests.server.scraping import read, scrape

pytestmark = pytest.mark.model

LIMIT = 100_000_000  # tokens a minute of the tier
SHEET = "a mill grinds grain into flour for bread and " * 24
NUM_PAGES = 400
PATH = "/v1/collections/leaving/documents"
COUNT = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True)
class Leaver:
    """A new key's client, which nobody else uses."""

    client: httpx.Client
    keyed: KeyedServer

    def num_charged(self) -> int:
        """Tokens of the last minute."""
        told = self.client.post(f"{PATH}/delete", json={"ids": ["none"]})
        return LIMIT - int(told.headers["x-ratelimit-remaining-tokens"])

    def leave(self, path: str, body: dict[str, Any], has_begun: Callable[[], bool]) -> None:
        """Ask for something and close the connection when a part of it is done."""
        request = self.client.build_request("POST", path, json=body)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection(("127.0.0.1", self.keyed.process.port)) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
            until(has_begun)
        until(lambda: self.figure("http_requests") == 0)

    def figure(self, name: str) -> int:
        return int(self.client.get("/fault/state").json()[name])

    @property
    def cpu_s(self) -> float:
        """Processor time that the server has used."""
        fields = Path(f"/proc/{self.keyed.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def num_documents(self) -> int:
        return len(self.client.get(PATH).json()["data"])


@pytest.fixture
def leaver(keyed: KeyedServer, request: pytest.FixtureRequest) -> Iterator[Leaver]:
    name = request.node.name[:40]
    key = keyed.add(name, "pro")
    with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
        until(lambda: client.post("/v1/collections", json={"name": "leaving"}).status_code == 200)
        yield Leaver(client, keyed)
        until(lambda: client.delete("/v1/collections/leaving").status_code == 200)
    keyed.remove(name)


def test_documents_that_were_not_embedded_are_not_charged(leaver: Leaver) -> None:
    pages = [{"id": str(number), "text": f"{number}: {SHEET}"} for number in range(NUM_PAGES)]
    before = leaver.figure("progress")
    assert leaver.client.post(PATH, json={"documents": pages[:16]}).status_code == 200
    of_a_group, stored_at = leaver.num_charged(), leaver.figure("progress")
    assert of_a_group > 16 * 200
    begun_at = stored_at + 2 * (stored_at - before)
    leaver.leave(PATH, {"documents": pages[16:]}, lambda: leaver.figure("progress") > begun_at)
    charged = leaver.num_charged() - of_a_group
    assert 0.9 * of_a_group < charged < 0.8 * NUM_PAGES / 16 * of_a_group
    assert leaver.num_documents() == 16


def test_documents_that_were_not_ranked_are_not_charged(leaver: Leaver) -> None:
    body = {"model": SMOLLM2, "query": "flour?", "documents": ["a mill"] * 8}
    assert leaver.client.post("/rerank", json=body).status_code == 200
    of_a_group = leaver.num_charged()
    before = leaver.figure("generated_tokens")
    leaver.client.post("/fault/slow?seconds=0.1")
    try:
        many = body | {"documents": ["a mill"] * 200}
        leaver.leave("/rerank", many, lambda: leaver.figure("generated_tokens") > before)
    finally:
        leaver.client.post("/fault/slow?seconds=0")
    assert of_a_group <= leaver.num_charged() - of_a_group < 0.8 * 200 / 8 * of_a_group


def test_a_long_text_is_not_cut_into_tokens_to_its_end(leaver: Leaver) -> None:
    """In processor time, the best of three: what disturbs a measurement only makes it longer."""
    texts = (" ".join(f"{salt}{number}" for number in range(60_000)) for salt in "abcdefgh")
    before = leaver.cpu_s
    assert leaver.client.post(COUNT, json=counted(next(texts))).json()["input_tokens"] > 60_000
    whole_s = leaver.cpu_s - before
    took = [left_in_the_middle(leaver, next(texts), whole_s) for _ in range(3)]
    assert min(took) < 0.6 * whole_s


def left_in_the_middle(leaver: Leaver, text: str, whole_s: float) -> float:
    """Processor time spent on a text whose sender leaves once a quarter of the work is done."""
    before = leaver.cpu_s
    leaver.leave(COUNT, counted(text), lambda: leaver.cpu_s > before + whole_s / 4)
    quiet_at = leaver.cpu_s
    time.sleep(0.3)
    while leaver.cpu_s > quiet_at + 0.02:
        quiet_at = leaver.cpu_s
        time.sleep(0.3)
    return quiet_at - before


def counted(text: str) -> dict[str, Any]:
    return {"model": SMOLLM2, "messages": [{"role": "user", "content": text}]}


def test_embedding_stops_between_groups(server: ServerProcess, patience: float) -> None:
    page = {"model": MINILM, "input": ["word " * 400] * 2}
    with server.client() as client:
        began = time.monotonic()
        assert client.post("/v1/embeddings", json=page).status_code == 200
        two_s, aborted = time.monotonic() - began, num_aborted(server)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/embeddings", json=page | {"input": ["word " * 400] * 300}, timeout=max(1.0, two_s))
    until(lambda: num_aborted(server) > aborted, (2 + 10 * two_s) * patience)


def num_aborted(server: ServerProcess) -> float:
    return read(scrape(server), "kvarn_num_aborted_requests_total", model_name=MINILM)
