"""A router that is given one name: whoever has its addresses is a replica, and may come and go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.process import ServerProcess
from tests.server.resolving import HOST
from tests.server.routed import CHAT, REPLICA, RouterProcess, body, cluster_files, free_port, replica

ADDRESSES = [f"127.0.0.{number}" for number in (2, 3, 4)]


@dataclass(frozen=True, slots=True)
class Named:
    """Three servers with one port on addresses of their own, those that the name has, and a router to the name."""

    key: Path
    servers: list[ServerProcess]
    hosts: Path
    discover: tuple[str, ...]
    router: RouterProcess

    def have(self, *words: str) -> None:
        """What the name has from now on."""
        written = self.hosts.with_suffix(".new")
        written.write_text("\n".join(words), encoding="utf-8")
        written.replace(self.hosts)

    def another_router(self) -> RouterProcess:
        return RouterProcess(self.key, (), *self.discover, module="tests.server.resolving")


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Named]:
    model, key = cluster_files(tmp_path)
    hosts, port = tmp_path / "hosts", str(free_port())
    hosts.write_text("\n".join(ADDRESSES[:2]), encoding="utf-8")
    monkeypatch.setenv("KVARN_TEST_HOSTS", str(hosts))
    options = ("--port", port, "--drain-delay", "4", "--drain-timeout", "20")
    servers = [replica(model, key, "--host", address, *options) for address in ADDRESSES]
    with ExitStack() as stack:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(stack.enter_context, servers))
        discover = ("--discover", f"http://{HOST}:{port}", "--max-replicas", "4")
        router = RouterProcess(key, (), *discover, module="tests.server.resolving")
        yield Named(key, servers, hosts, discover, stack.enter_context(router))


def test_replicas_are_the_addresses_of_a_name(named: Named) -> None:
    assert "routing to 2 of 2 replicas" in named.router.line
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        with named.router.client() as client:
            while not is_over.is_set():
                statuses.append(client.post(CHAT, json=body(f"Question {len(statuses)}", max_tokens=8)).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with named.router.client() as client:
            named.have(*ADDRESSES)
            named.router.until_usable(3)
            asked: set[str] = set()
            for number in range(200):  # the least loaded is chosen: on a busy machine not each of three in twelve tries
                asked.add(client.post(CHAT, json=body(f"{number}")).headers[REPLICA])
                if len(asked) == 3:
                    break
            assert asked == {"0", "1", "2"}
            named.have("fail")  # nobody knows: all stay
            named.servers[0].process.send_signal(signal.SIGTERM)
            named.have(*ADDRESSES[1:])  # a pod that ends has left the name, and drains
            named.router.until_usable(2)
            assert named.servers[0].process.wait(60) == 0
            assert {client.post(CHAT, json=body(f"{n}")).headers[REPLICA] for n in range(8)} <= {"1", "2"}
    finally:
        is_over.set()
        asking.join()
    assert len(statuses) > 5
    assert set(statuses) == {200}


def test_homes_are_the_same_for_routers_that_found_replicas_in_another_order(named: Named) -> None:
    """A response is read through a router whose numbers are others, and so is what a key keeps."""
    named.have(ADDRESSES[1])
    with named.another_router() as late:
        late.until_usable(1)
        named.have(*ADDRESSES[:2])
        late.until_usable(2)
        with named.router.client() as one, late.client() as other:
            for _ in range(4):
                stored = one.post("/v1/responses", json={"model": "tiny", "input": "hi", "max_output_tokens": 4})
                read = other.get(f"/v1/responses/{stored.json()['id']}")
                assert read.status_code == 200, read.text
                assert {stored.headers[REPLICA], read.headers[REPLICA]} == {"0", "1"}
            for number in range(4):
                key = {"authorization": f"Bearer {number}"}
                homes = {client.get("/v1/models", headers=key).headers[REPLICA] for client in (one, other)}
                assert homes == {"0", "1"}


def test_a_name_without_addresses_is_told_and_looked_up_again(named: Named) -> None:
    named.have()
    with named.another_router() as router, router.client() as client:
        assert "routing to 0 of 0 replicas" in router.line
        assert "replicas.test has no address" in router.log
        assert client.get("/health").status_code == 503
        named.have(ADDRESSES[2])
        router.until_usable(1)
        assert client.post(CHAT, json=body("hi")).status_code == 200
