"""HTTP as the RFCs want it: pipelines, expectations, methods, CORS, keep-alive (hardening A7)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.server.edge_client import HEALTH, Client, EdgeServer, check_told, expected_tokens, post, undisturbed, until

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


# A7: pipelining


def test_pipelined_requests_are_answered_in_order(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(get("/tokens?n=5") + post("/echo", b'{"a":1}') + HEALTH + get("/tokens?n=2"))
        assert client.reply().body == expected_tokens(5)
        assert client.reply().json == {"a": 1}
        assert client.reply().json == {"status": "ok"}
        assert client.reply().body == expected_tokens(2)
        assert client.send(HEALTH).reply().status == 200


def test_requests_behind_too_many_others_are_not_answered_and_the_connection_ends(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(get("/tokens?n=20") + HEALTH * 1000)
        assert client.reply().body == expected_tokens(20)
        replies = [client.reply() for _ in range(16)]
        assert {reply.status for reply in replies} == {200}
        assert [reply.closes for reply in replies] == [False] * 15 + [True]
        assert client.is_closed()


def test_rubbish_behind_a_request_does_not_get_into_its_response(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(get("/tokens?n=20"))
        time.sleep(0.05)
        client.send(b"\x16\x03\x01 rubbish\r\n\r\n")
        assert client.reply().body == expected_tokens(20)
        assert client.is_closed()


def test_nothing_is_answered_after_connection_close(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(get("/health", "Connection: close") + HEALTH)
        assert client.reply().closes
        assert client.is_closed()


def test_a_pipelined_upload_does_not_disturb_the_response_before_it(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(get("/tokens?n=20") + post("/echo", b'{"a":"' + b"x" * 1_000_000 + b'"}'))
        assert client.reply().body == expected_tokens(20)
        assert client.is_closed()


def test_a_client_that_leaves_pipelined_requests_behind_cancels_the_running_one(edge: EdgeServer) -> None:
    before = edge.figures()["cancelled"]
    with edge.client() as client:
        client.send(get("/wait") + HEALTH)
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    while edge.figures()["cancelled"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# A7: Expect


def test_100_continue_is_sent_when_the_body_is_wanted(edge: EdgeServer) -> None:
    with edge.client() as client:
        request = post("/echo", b'{"a":1}', "Expect: 100-continue")
        client.send(request[:-7])
        assert client.head() == b"HTTP/1.1 100 Continue"
        assert client.send(request[-7:]).reply().json == {"a": 1}
        assert client.send(HEALTH).reply().status == 200


def test_a_refused_body_is_not_asked_for(edge: EdgeServer) -> None:
    for path, status in (("/early", 401), ("/nowhere", 404), ("/health", 405)):
        with edge.client() as client:
            reply = client.send(post(path, b'{"a":1}', "Expect: 100-continue")[:-7]).reply()
            assert (reply.status, reply.closes) == (status, True)
            assert client.is_closed()
    with edge.client() as client:
        client.send(post("/echo", b"", "Expect: 100-continue").replace(b"ength: 0", b"ength: 99999999"))
        check_told(client.reply(), 413)


def test_another_expectation_is_refused(edge: EdgeServer) -> None:
    check_told(edge.ask(get("/health", "Expect: tea")), 417)


def test_http_1_0_clients_are_served_and_get_no_100_continue(edge: EdgeServer) -> None:
    with edge.client() as client:
        client.send(post("/echo", b"{}", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
        reply = client.reply()
        assert (reply.status, reply.body, reply.closes) == (200, b"{}", True)
        assert client.is_closed()


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(edge: EdgeServer) -> None:
    with edge.client() as client:
        head = client.send(get("/tokens?n=5").replace(b"HTTP/1.1", b"HTTP/1.0")).head().lower()
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert client.everything() == expected_tokens(5)


def test_an_http_1_0_client_that_does_not_read_its_stream_is_dropped(edge: EdgeServer) -> None:
    dropped = edge.figures()["dropped"]
    with edge.client(receive_bytes=4096) as client:
        client.send(get("/flood").replace(b"HTTP/1.1", b"HTTP/1.0"))
        until(lambda: edge.figures()["dropped"] == dropped + 1)


# A7: methods


def test_head_has_the_headers_of_get_and_no_body(edge: EdgeServer) -> None:
    with edge.client() as client:
        head = client.send(get("/health").replace(b"GET", b"HEAD")).head()
        assert b"200 OK" in head
        assert b"content-length: 15" in head
        assert client.send(HEALTH).reply().json == {"status": "ok"}  # no stray body between the two


def test_a_refused_head_request_gets_no_body(edge: EdgeServer) -> None:
    with edge.client() as client:
        assert b" 400 " in client.send(b"HEAD /health HTTP/1.1\r\n\r\n").head()
        assert client.is_closed()


def test_options_for_the_whole_server_lists_methods(edge: EdgeServer) -> None:
    reply = edge.ask(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert reply.status == 204
    assert "POST" in reply.headers["allow"]


def test_options_for_a_path_and_unknown_methods_say_what_is_allowed(edge: EdgeServer) -> None:
    for method in (b"OPTIONS", b"PUT", b"PATCH", b"DELETE", b"TRACE", b"PROPFIND"):
        reply = edge.ask(get("/health").replace(b"GET", method))
        check_told(reply, 405, "method_not_allowed")
        assert "GET" in reply.headers["allow"]


def test_no_tunnel_is_opened(edge: EdgeServer) -> None:
    check_told(edge.ask(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"), 501)


# A7: CORS


def cors(reply_headers: object) -> set[str]:
    assert isinstance(reply_headers, dict)
    return {name for name in reply_headers if name.startswith("access-control-")}


def test_only_a_configured_origin_may_read_and_never_with_credentials(edge: EdgeServer) -> None:
    reply = edge.ask(get("/health", f"Origin: {ORIGIN}"))
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in reply.headers
    for origin in ("https://evil.example", "null", ORIGIN + ".evil.example", ORIGIN.upper()):
        assert not cors(edge.ask(get("/health", f"Origin: {origin}")).headers)


def test_a_preflight_is_answered_for_a_configured_origin_only(edge: EdgeServer) -> None:
    wishes = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")
    ask = get("/echo", f"Origin: {ORIGIN}", *wishes).replace(b"GET", b"OPTIONS")
    reply = edge.ask(ask)
    assert reply.status == 204
    assert reply.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in reply.headers
    refused = edge.ask(ask.replace(ORIGIN.encode(), b"https://evil.example"))
    assert (refused.status, cors(refused.headers)) == (405, set())


def test_cors_is_off_unless_configured() -> None:
    with EdgeServer() as server:
        assert not cors(server.ask(get("/health", f"Origin: {ORIGIN}")).headers)
        wish = get("/echo", f"Origin: {ORIGIN}", "Access-Control-Request-Method: POST").replace(b"GET", b"OPTIONS")
        assert not cors(server.ask(wish).headers)


def test_every_response_has_an_id_of_its_own(edge: EdgeServer) -> None:
    with edge.client() as client:
        ids = [client.send(get("/health", "X-Request-Id: mine")).reply().headers["x-request-id"] for _ in range(10)]
    assert len({*ids, "mine"}) == 11


def test_keep_alive_serves_many_requests_on_one_connection_without_waiting(edge: EdgeServer) -> None:
    took_s = []
    with edge.client() as client:
        for number in range(50):
            began = time.monotonic()
            assert client.send(post("/echo", b'{"n":%d}' % number)).reply().json == {"n": number}
            took_s.append(time.monotonic() - began)
    assert min(took_s[10:]) < 0.035  # with Nagle's algorithm every one of them would take 40 ms


def test_a_request_in_single_bytes_is_read(edge: EdgeServer) -> None:
    with edge.client() as client:
        _drip(client, post("/echo", b'{"a":1}'))
        assert client.reply().json == {"a": 1}


def _drip(client: Client, data: bytes) -> None:
    for byte in data:
        client.send(bytes([byte]))
