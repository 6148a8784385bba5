"""Thousands of connections that are slow or idle, and others that are served all the same (hardening A3, A9)."""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import Record, Size
from tests.server.edge_client import HEALTH, EdgeServer, Reply, check_told, expected_tokens, post, undisturbed, until

HEADER_S, BODY_S = 5.0, 6.0
SPARE = 500  # descriptors of the test process that are not for the crowd


@contextmanager
def crowd(server: EdgeServer, wanted: int) -> Iterator[list[socket.socket]]:
    """As many connections as wanted, or as the system lets one process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = wanted + SPARE if hard == resource.RLIM_INFINITY else min(wanted + SPARE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, room), hard))
    sockets = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(min(wanted, room - SPARE))]
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def readable(sockets: list[socket.socket], wait_s: float = 0.0) -> list[socket.socket]:
    """Those on which something came."""
    poll = select.poll()
    by_fd = {one.fileno(): one for one in sockets}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(wait_s * 1000)]


def answer(one: socket.socket) -> bytes:
    """Everything until the end of the connection."""
    parts = []
    try:
        while part := one.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_others_are_served_beside_2000_slow_connections(patience: float, record: Record) -> None:
    settings = {"header_timeout_s": HEADER_S, "body_timeout_s": BODY_S, "max_connections_per_address": 4096}
    with EdgeServer(**settings) as server, undisturbed(server):
        began = time.monotonic()
        request = post("/echo", b"x" * 1000)[:-1000]
        with crowd(server, 2000) as slow:
            for number, one in enumerate(slow):
                one.sendall(request if number % 2 else b"GET /")
            delays = _serve_beside(server, slow, HEADER_S - (time.monotonic() - began) - 0.5)
            until(lambda: server.figures()["open"] < 50, 4 * (BODY_S + 2.0) * patience)
            ended_s = time.monotonic() - began
            answers = [answer(one) for one in slow]
        assert sum(one.startswith(b"HTTP/1.1 408") for one in answers) == len(slow)
        assert sorted(delays)[len(delays) // 2] < 0.1 * patience
        assert max(delays) < 1.0 * patience
        record("slow-connections", {"num_connections": len(slow), "max_delay_s": max(delays), "ended_s": ended_s})


def _serve_beside(server: EdgeServer, slow: list[socket.socket], seconds: float) -> list[float]:
    """Another byte on every slow connection each second; how long others wait for their answers meanwhile."""
    delays: list[float] = []
    end, next_byte = time.monotonic() + seconds, 0.0
    while not delays or time.monotonic() < end:
        if time.monotonic() >= next_byte:
            next_byte = time.monotonic() + 1.0
            for one in slow:
                one.sendall(b"E")
        began = time.monotonic()
        assert server.ask(post("/echo", b'{"a":1}')).json == {"a": 1}
        delays.append(time.monotonic() - began)
        time.sleep(0.02)
    return delays


def test_thousands_of_idle_connections_are_bounded_and_shut_nobody_out(size: Size, patience: float) -> None:
    limit, num_idle = size(500, 4096), size(3000, 10_000)
    settings = {"max_connections": limit, "max_connections_per_address": limit, "header_timeout_s": 120}
    with EdgeServer(**settings, keep_alive_s=120) as server, undisturbed(server):
        before = server.figures()["rss_bytes"]
        with crowd(server, num_idle) as idle:
            until(lambda: len(readable(idle)) >= len(idle) - limit, 60 * patience)
            told = readable(idle)
            assert all(answer(one).startswith(b"HTTP/1.1 503") for one in told)
            assert len(idle) - limit <= len(told) <= len(idle) - limit + 10  # the neighbour has one or two
            assert server.ask(b"GET /tokens?n=10 HTTP/1.1\r\nHost: localhost\r\n\r\n").body == expected_tokens(10)
            figures = server.figures()
            assert figures["open"] <= limit
            assert figures["rss_bytes"] - before < limit * 40_000


def test_idle_connections_after_a_request_make_room_without_a_word() -> None:
    with EdgeServer(max_connections=20) as server, undisturbed(server):
        idle = [server.client() for _ in range(15)]
        for one in idle:
            assert one.send(HEALTH).reply().status == 200
        time.sleep(0.2)  # what has waited for less makes no room
        newcomers = [server.client() for _ in range(10)]
        assert all(one.send(HEALTH).reply().status == 200 for one in newcomers)
        closed = readable([one.socket for one in idle])
        assert closed
        assert all(answer(one) == b"" for one in closed)
        assert set(closed) == {one.socket for one in idle[: len(closed)]}
        for one in [*idle, *newcomers]:
            one.socket.close()


def test_a_busy_connection_makes_room_for_nobody_and_probes_are_answered_all_the_same() -> None:
    busy = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with EdgeServer(max_connections=20) as server:
        clients = [server.client().send(busy) for _ in range(20)]
        until(lambda: server.ask(HEALTH).closes)  # it is beyond the limit
        for _ in range(3):
            check_full(server)
            assert server.ask(HEALTH).status == 200
        silent = [server.client() for _ in range(300)]  # more than are taken beyond the limit
        assert server.ask(HEALTH).status == 200
        assert answer(silent[0].socket).startswith(b"HTTP/1.1 503")
        assert not readable([one.socket for one in clients])
        for one in [*clients, *silent]:
            one.socket.close()
        until(lambda: not server.ask(HEALTH).closes)


def test_probes_under_the_prefix_of_a_proxy_are_answered_all_the_same() -> None:
    prefixed, lookalike = HEALTH.replace(b"/health", b"/llm/health"), HEALTH.replace(b"/health", b"/llmx/health")
    with EdgeServer(max_connections=20, root_path="/llm") as server:
        clients = [server.client().send(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(20)]
        until(lambda: server.ask(HEALTH).closes)
        check_full(server)
        assert [server.ask(one).status for one in (HEALTH, prefixed, lookalike)] == [200, 200, 503]
        for one in clients:
            one.socket.close()


def test_one_address_has_a_share_and_others_the_rest() -> None:
    busy = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with EdgeServer(max_connections=20, max_connections_per_address=8) as server:
        clients = [server.client().send(busy) for _ in range(8)]
        until(lambda: server.ask(HEALTH).closes)
        check_full(server)
        with socket.create_connection(("127.0.0.1", server.port), 60, ("127.0.0.2", 0)) as other:
            other.sendall(post("/echo", b'{"a":1}'))
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
        for one in clients:
            one.socket.close()


def check_full(server: EdgeServer) -> None:
    """A client that is one too many reads why, whether it sends its request or not."""
    for data in (b"", post("/echo", b"x" * 100_000)):
        with server.client() as client:
            client.try_send(data)
            reply = client.reply()
            check_told(reply, 503, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
            assert reply.closes


def test_bodies_of_many_requests_are_bounded_together(patience: float) -> None:
    """Forty bodies of a megabyte, when thirty-two may be held: the rest is asked to come back."""
    body = post("/wait", b"x" * (1 << 20))
    with EdgeServer(max_body_bytes=1 << 20, body_timeout_s=60) as server, undisturbed(server):
        clients = [server.client() for _ in range(40)]
        for client in clients:
            assert client.try_send(body)
        refused: list[Reply] = []
        until(lambda: len(readable([client.socket for client in clients])) >= 8, 30 * patience)
        for one in readable([client.socket for client in clients]):
            refused += [client.reply() for client in clients if client.socket is one]
        assert 7 <= len(refused) <= 12
        for reply in refused:
            check_told(reply, 503, "overloaded")
        assert server.figures()["body_bytes"] <= 33 << 20
        for client in clients:
            client.socket.close()


@pytest.mark.parametrize("limit", [200, 300])
def test_with_few_descriptors_the_server_takes_fewer_connections_and_stays_alive(limit: int) -> None:
    with EdgeServer(max_descriptors=limit, header_timeout_s=60) as server, undisturbed(server):
        with crowd(server, limit + 100) as idle:
            until(lambda: len(readable(idle)) >= 100, 30.0)
            assert server.process.poll() is None
        until(lambda: server.ask(HEALTH).status == 200)
