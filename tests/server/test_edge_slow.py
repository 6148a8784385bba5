"""Clients that send slowly, do not read, or leave, in every phase of a request (hardening A3, A8)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.server.edge_client import HEALTH, Client, EdgeServer, check_told, expected_tokens, post, undisturbed, until

HEADER_S, BODY_S, KEEP_ALIVE_S, WRITE_S = 1.0, 1.5, 0.8, 1.2
BUFFERED = 64 << 10
SMALL_WINDOW = 4096  # of a client: so that a little unread data is felt by the server


@pytest.fixture(scope="module")
def shared() -> Iterator[EdgeServer]:
    with EdgeServer(
        header_timeout_s=HEADER_S,
        body_timeout_s=BODY_S,
        keep_alive_s=KEEP_ALIVE_S,
        write_timeout_s=WRITE_S,
        max_buffered_bytes=BUFFERED,
    ) as server:
        yield server


@pytest.fixture
def edge(shared: EdgeServer) -> Iterator[EdgeServer]:
    with undisturbed(shared):
        yield shared


@pytest.fixture
def cancelled(edge: EdgeServer) -> Callable[[], None]:
    """Wait until one more request was cancelled than when the test began."""
    before = edge.figures()["cancelled"]
    return lambda: until(lambda: edge.figures()["cancelled"] == before + 1, 20.0)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def drip(client: Client, data: bytes, gap_s: float) -> float:
    """Send byte by byte until the server answers or all is sent; returns the seconds it took."""
    began = time.monotonic()
    client.socket.settimeout(gap_s)
    for byte in data:
        try:
            client.socket.sendall(bytes([byte]))
            client.socket.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            continue
        except OSError:
            break
    client.socket.settimeout(30.0)
    return time.monotonic() - began


# A3: slow senders


def test_a_head_in_slow_bytes_ends_at_its_deadline(edge: EdgeServer, patience: float) -> None:
    with edge.client() as client:
        assert HEADER_S * 0.9 < drip(client, HEALTH, 0.1) < (HEADER_S + 0.5) * patience
        reply = client.reply()
        check_told(reply, 408, "request_timeout")
        assert reply.closes
        assert client.is_closed()


def test_a_second_head_in_slow_bytes_ends_at_its_deadline_too(edge: EdgeServer, patience: float) -> None:
    with edge.client() as client:
        assert client.send(HEALTH).reply().status == 200
        assert HEADER_S * 0.9 < drip(client, HEALTH, 0.1) < (HEADER_S + 0.5) * patience
        check_told(client.reply(), 408, "request_timeout")


def test_empty_lines_before_a_request_do_not_stop_the_clock(edge: EdgeServer, patience: float) -> None:
    with edge.client() as client:
        assert drip(client, b"\r\n" * 100, 0.1) < (HEADER_S + 0.5) * patience
        check_told(client.reply(), 408, "request_timeout")


def test_a_body_in_slow_bytes_ends_at_its_deadline(edge: EdgeServer, patience: float) -> None:
    request = post("/echo", b'{"a":"' + b"x" * 100 + b'"}')
    with edge.client() as client:
        client.send(request[:-100])
        assert BODY_S * 0.9 < drip(client, request[-100:], 0.1) < (BODY_S + 0.5) * patience
        reply = client.reply()
        check_told(reply, 408, "request_timeout")
        assert reply.closes


def test_slow_chunks_end_at_the_deadline(edge: EdgeServer, patience: float) -> None:
    head = post("/echo", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with edge.client() as client:
        client.send(head)
        assert drip(client, b"1\r\nx\r\n" * 20, 0.1) < (BODY_S + 0.5) * patience
        check_told(client.reply(), 408, "request_timeout")


def test_a_slow_client_within_the_deadlines_is_served(edge: EdgeServer) -> None:
    request = post("/echo", b'{"a":1}')
    with edge.client() as client:
        drip(client, request[:10], 0.02)
        client.send(request[10:-7])
        drip(client, request[-7:], 0.05)
        assert client.reply().json == {"a": 1}


def test_a_connection_without_a_request_is_closed_without_a_word(edge: EdgeServer, patience: float) -> None:
    began = time.monotonic()
    with edge.client() as client:
        assert client.is_closed()
    assert HEADER_S * 0.9 < time.monotonic() - began < (HEADER_S + 0.5) * patience


def test_an_idle_connection_is_closed_after_its_time(edge: EdgeServer, patience: float) -> None:
    with edge.client() as client:
        assert client.send(HEALTH).reply().status == 200
        began = time.monotonic()
        assert client.is_closed()
    assert KEEP_ALIVE_S * 0.9 < time.monotonic() - began < (KEEP_ALIVE_S + 0.5) * patience


def test_a_long_answer_is_not_cut_by_the_deadlines_of_the_request(edge: EdgeServer) -> None:
    with edge.client() as client:
        assert client.send(get("/tokens?n=25&gap=0.1")).reply().body == expected_tokens(25)


# A8: clients that leave


def leave_with_fin(client: Client) -> None:
    client.socket.close()


def leave_with_reset(client: Client) -> None:
    client.reset()


def leave_by_halves(client: Client) -> None:
    client.socket.shutdown(socket.SHUT_WR)


LEAVING = [leave_with_fin, leave_with_reset, leave_by_halves]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize(
    "sent", [b"", b"GET", HEALTH[:-2], post("/echo", b'{"a":1}')[:-3], post("/wait", b"x" * 200_000)[:-100_000]]
)
def test_a_client_may_leave_before_its_request_is_complete(
    edge: EdgeServer, leave: Callable[[Client], None], sent: bytes
) -> None:
    with edge.client() as client:
        client.send(sent)
        time.sleep(0.02)
        leave(client)
    assert edge.ask(HEALTH).status == 200  # what is left behind, the fixture tells


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("path", ["/wait", "/tokens?n=1000&gap=0.02", "/flood?gap=0.01"])
def test_a_client_that_leaves_before_its_answer_is_complete_cancels_it(
    edge: EdgeServer, leave: Callable[[Client], None], path: str, cancelled: Callable[[], None], patience: float
) -> None:
    with edge.client() as client:
        client.send(get(path))
        if path != "/wait":
            client.socket.recv(100)
        time.sleep(0.05)
        leave(client)
        began = time.monotonic()
        cancelled()
        assert time.monotonic() - began < 0.5 * patience


def test_a_client_that_leaves_during_its_upload_cancels_it(edge: EdgeServer, cancelled: Callable[[], None]) -> None:
    with edge.client() as client:
        client.send(post("/wait", b"x" * 100))
        time.sleep(0.02)
    cancelled()


# A8: clients that do not read


def test_a_stream_that_nobody_reads_is_dropped_after_the_write_timeout(
    edge: EdgeServer, cancelled: Callable[[], None], patience: float
) -> None:
    dropped = edge.figures()["dropped"]
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        began = time.monotonic()
        client.send(get("/flood?gap=0.3"))  # 50 kB/s: the timeout comes before the buffer is full
        cancelled()
        assert time.monotonic() - began < (WRITE_S + 3.0) * patience
    assert edge.figures()["dropped"] == dropped + 1


def test_a_stream_that_nobody_reads_is_dropped_when_its_buffer_is_full(
    edge: EdgeServer, cancelled: Callable[[], None], patience: float
) -> None:
    before = edge.figures()
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        began = time.monotonic()
        client.send(get("/flood"))
        cancelled()
        assert time.monotonic() - began < (1.0 + 1.0) * patience
    after = edge.figures()
    assert after["dropped"] == before["dropped"] + 1
    assert after["rss_bytes"] - before["rss_bytes"] < 16 << 20


def test_a_page_that_nobody_reads_is_dropped_after_the_write_timeout(edge: EdgeServer, patience: float) -> None:
    dropped = edge.figures()["dropped"]
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        began = time.monotonic()
        client.send(get("/page?size=4000000"))
        until(lambda: edge.figures()["dropped"] == dropped + 1)
        assert WRITE_S * 0.9 < time.monotonic() - began < (WRITE_S + 1.0) * patience


def test_a_reader_of_one_byte_now_and_then_is_dropped_too(edge: EdgeServer) -> None:
    dropped = edge.figures()["dropped"]
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        client.send(get("/page?size=4000000"))

        def reads_a_byte() -> bool:
            client.socket.recv(1)
            return edge.figures()["dropped"] == dropped + 1

        until(reads_a_byte)


def test_a_slow_but_honest_reader_gets_everything(edge: EdgeServer) -> None:
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        client.send(get("/page?size=400000"))
        began, received = time.monotonic(), 0
        while received < 400_000:  # about 100 kB/s
            received += len(client.socket.recv(16384))
            time.sleep(0.05)
        assert time.monotonic() - began > 1.5 * WRITE_S  # the timeout is for a part, not for the whole


def test_a_client_that_asks_and_never_reads_is_dropped(edge: EdgeServer, patience: float) -> None:
    dropped = edge.figures()["dropped"]
    with edge.client(receive_bytes=SMALL_WINDOW) as client:
        client.socket.settimeout(0.2)
        for _ in range(200):
            if not client.try_send(get("/page?size=100000")):
                break
        until(lambda: edge.figures()["dropped"] == dropped + 1)


# Draining


def test_while_draining_each_answer_is_the_last_of_its_connection() -> None:
    with EdgeServer() as server, server.client() as client, server.client() as idle:
        assert not idle.send(HEALTH).reply().closes
        assert client.send(get("/drain")).reply().status == 200
        reply = idle.send(HEALTH).reply()
        assert (reply.status, reply.closes) == (200, True)
        assert idle.is_closed()
