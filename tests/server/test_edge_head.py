"""Heads from hostile clients: size, where a request ends, whom it is for (hardening A2, A7)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.server.edge_client import HEALTH, EdgeServer, check_told, post, undisturbed

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def shared() -> Iterator[EdgeServer]:
    with EdgeServer(cors_origins=[ORIGIN], allowed_hosts=["kvarn.internal"], header_timeout_s=5.0) as server:
        yield server


@pytest.fixture
def edge(shared: EdgeServer) -> Iterator[EdgeServer]:
    with undisturbed(shared):
        yield shared


def get(path: str, *headers: str, host: str | None = "Host: localhost") -> bytes:
    lines = [f"GET {path} HTTP/1.1", *([host] if host is not None else []), *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


# A2: size


def test_a_header_over_the_limit_is_refused(edge: EdgeServer) -> None:
    reply = edge.ask(get("/health", "X-Long: " + "x" * 32768))
    check_told(reply, 431, "headers_too_large")
    assert reply.closes


def test_many_headers_that_are_too_large_together_are_refused(edge: EdgeServer) -> None:
    check_told(edge.ask(get("/health", *(f"X-{number}: {'x' * 1000}" for number in range(40)))), 431)


def test_headers_just_below_the_limits_are_taken(edge: EdgeServer) -> None:
    assert edge.ask(get("/health", "X-Long: " + "x" * 32000)).status == 200
    assert edge.ask(get("/health", *(f"X-{number}: x" for number in range(99)))).status == 200


def test_a_hundred_and_one_headers_are_refused(edge: EdgeServer) -> None:
    check_told(edge.ask(get("/health", *(f"X-{number}: x" for number in range(100)))), 431, "too_many_headers")


def test_a_header_without_end_is_refused_before_it_fills_the_memory(edge: EdgeServer) -> None:
    for begin in (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"GET /health HTTP/1.1\r\n", b"\r\n" * 4):
        with edge.client() as client:
            client.send(begin)
            for _ in range(16):
                client.try_send(b"x" * 65536)
            assert client.reply().status in (400, 431)


def test_a_url_of_a_megabyte_is_refused(edge: EdgeServer) -> None:
    reply = edge.ask(get("/" + "x" * 1_000_000))
    check_told(reply, 414, "url_too_long")
    assert reply.closes


def test_a_url_of_8_kilobytes_is_taken(edge: EdgeServer) -> None:
    assert edge.ask(get("/health?" + "x" * 8000)).status == 200


# A7: where a request ends, in everybody's opinion

SMUGGLING = {
    "length and chunks": ["Content-Length: 3", "Transfer-Encoding: chunked"],
    "chunks and length": ["Transfer-Encoding: chunked", "Content-Length: 3"],
    "two lengths": ["Content-Length: 3", "Content-Length: 4"],
    "the same length twice": ["Content-Length: 3", "Content-Length: 3"],
    "a list of lengths": ["Content-Length: 3, 3"],
    "a signed length": ["Content-Length: +3"],
    "a negative length": ["Content-Length: -3"],
    "a hexadecimal length": ["Content-Length: 0x3"],
    "an empty length": ["Content-Length:"],
    "chunked twice": ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
    "chunked not last": ["Transfer-Encoding: chunked, identity"],
    "nearly chunked": ["Transfer-Encoding: xchunked"],
    "a strange space": ["Transfer-Encoding:\x0bchunked"],
    "a space before the colon": ["Transfer-Encoding : chunked"],
    "a folded header": ["X-One: a", " Transfer-Encoding: chunked"],
    "a bare line feed": ["X-One: a\nTransfer-Encoding: chunked"],
    "a NUL": ["X-One: a\x00b"],
    "a bare carriage return": ["X-One: a\rContent-Length: 3"],
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_an_ambiguous_length_is_refused_and_the_connection_ends(edge: EdgeServer, name: str) -> None:
    lines = ["POST /echo HTTP/1.1", "Host: localhost", "Content-Type: application/json", *SMUGGLING[name], "", ""]
    with edge.client() as client:
        client.send("\r\n".join(lines).encode("latin-1") + b"0\r\n\r\n" + HEALTH)
        reply = client.reply()
        check_told(reply, 400, "malformed_request")
        assert reply.closes
        assert client.is_closed()


def test_a_transfer_encoding_we_do_not_know_is_refused(edge: EdgeServer) -> None:
    check_told(edge.ask(get("/health", "Transfer-Encoding: gzip, chunked")), 501, "unsupported_encoding")


def test_chunks_from_http_1_0_are_refused(edge: EdgeServer) -> None:
    check_told(edge.ask(get("/health", "Transfer-Encoding: chunked").replace(b"1.1", b"1.0") + b"0\r\n\r\n"), 400)


@pytest.mark.parametrize(
    "line", [b"GET /health HTTP/2.0", b"GET /health HTTP/0.9", b"PRI * HTTP/2.0", b"GET /health HTTP/1.2"]
)
def test_another_version_is_refused(edge: EdgeServer, line: bytes) -> None:
    reply = edge.ask(line + b"\r\nHost: localhost\r\n\r\nSM\r\n\r\n")
    check_told(reply, reply.status)
    assert reply.status in (400, 505)
    assert reply.closes


@pytest.mark.parametrize(
    "rubbish", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x00\x00\x00\x00", b"hello\r\n\r\n", b"GET\r\n\r\n", b"{}\r\n"]
)
def test_what_is_not_http_is_refused(edge: EdgeServer, rubbish: bytes) -> None:
    reply = edge.ask(rubbish)
    check_told(reply, 400, "malformed_request")
    assert reply.closes


def test_an_offer_of_another_protocol_is_ignored_and_the_body_read(edge: EdgeServer) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with edge.client() as client:
        assert client.send(post("/echo", b'{"a":1}', *offer)).reply().json == {"a": 1}
        request = post("/echo", b'{"a":2}', *offer)
        client.send(request[:40])
        time.sleep(0.05)
        assert client.send(request[40:-3]).try_send(request[-3:])
        assert client.reply().json == {"a": 2}
        assert client.send(get("/health", "Connection: upgrade", "Upgrade: websocket")).reply().status == 200
        assert client.send(HEALTH).reply().status == 200


# A7: targets and hosts


def test_an_absolute_url_is_taken_and_its_host_counts(edge: EdgeServer) -> None:
    reply = edge.ask(get("http://localhost:1234/hosts?x=1", host="Host: evil.example"))
    assert reply.json == {"host": "localhost:1234", "url": "/hosts", "query": "x=1"}
    check_told(edge.ask(get("http://evil.example/hosts")), 403, "forbidden")


@pytest.mark.parametrize(
    "target",
    ["http:///health", "http://u:p@localhost/health", "ftp://localhost/health", "health", "*", "//", "http://"],
)
def test_a_strange_target_is_refused(edge: EdgeServer, target: str) -> None:
    reply = edge.ask(get(target))
    assert reply.status in (400, 404)
    check_told(reply, reply.status)


@pytest.mark.parametrize(
    "path",
    ["/../health", "/a/../health", "/health/.", "/%2e%2e/health", "/health%00", "/health%0d%0aX:1", "/%ff", "/a%5cb"],
)
def test_an_untidy_path_is_refused(edge: EdgeServer, path: str) -> None:
    check_told(edge.ask(get(path)), 400)


@pytest.mark.parametrize(
    "hosts", [[], ["a", "a"], [""], ["a b"], ["a,b"], ["a/b"], ["user@a"], ["a:b"], ["[::1"], ["a:123456"]]
)
def test_a_missing_double_or_broken_host_is_refused(edge: EdgeServer, hosts: list[str]) -> None:
    reply = edge.ask(get("/health", *(f"Host: {host}" for host in hosts), host=None))
    check_told(reply, 400, "malformed_request")
    assert reply.closes


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "[::2]"]
)
def test_a_foreign_host_is_refused_on_loopback(edge: EdgeServer, host: str) -> None:
    for path in ("/health", "/nowhere"):
        check_told(edge.ask(get(path, host=f"Host: {host}")), 403, "forbidden")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:80", "kvarn.internal", "localhost."]
)
def test_names_of_this_machine_and_configured_ones_are_served(edge: EdgeServer, host: str) -> None:
    assert edge.ask(get("/health", host=f"Host: {host}")).status == 200
