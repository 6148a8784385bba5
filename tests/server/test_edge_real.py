"""The edge of the whole server, with a model behind it (hardening A1-A10): the right refusal, and nobody notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Size
from tests.server.asking import CHAT
from tests.server.beside import a_neighbour, ask, chat, state_of, story
from tests.server.edge_client import HEALTH, Client, check_told, post, until
from tests.server.process import SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model

CONFIG = """
header_timeout_s = 2.0
body_timeout_s = 2.0
write_timeout_s = 1.5
max_buffered_bytes = 65536
max_body_bytes = 262144
queue_limit = 16
max_connections = 6000
max_connections_per_address = 6000
[engine]
max_running = 8
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    options = ("--model", model_path(SMOLLM2), "--context", "2048")
    with ServerProcess(*options, config=CONFIG, module="tests.server.faulty") as server:
        yield server


@pytest.fixture(scope="module")
def alone(shared: ServerProcess) -> str:
    """What the neighbour says when it is alone."""
    return story(shared)


@pytest.fixture
def server(shared: ServerProcess, alone: str) -> Iterator[ServerProcess]:
    """The server beside a neighbour's stream; afterwards everything is as before."""
    with a_neighbour(shared, alone):
        yield shared


def _headers(*more: str) -> bytes:
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: localhost", *more, "", ""]).encode("latin-1")


JSON = "Content-Type: application/json"
BAD: dict[str, tuple[bytes, int]] = {
    "A1 a declared length over the limit": (_headers(JSON, "Content-Length: 262145"), 413),
    "A1 a body over the limit": (post(CHAT, b"x" * 1_000_000), 413),
    "A1 chunks over the limit": (
        _headers(JSON, "Transfer-Encoding: chunked")
        + b"10000\r\n" * 1
        + b"x" * 65536
        + b"\r\n40000\r\n"
        + b"x" * 262144,
        413,
    ),
    "A2 a header of 33 KB": (_headers("X-Long: " + "x" * 33_000), 431),
    "A2 101 headers": (_headers(*(f"X-{number}: x" for number in range(101))), 431),
    "A2 a URL of a megabyte": (b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "A4 broken UTF-8": (post(CHAT, b'{"model":"\xff"}'), 400),
    "A4 a byte order mark": (post(CHAT, b"\xef\xbb\xbf{}"), 400),
    "A4 UTF-16": (post(CHAT, "{}".encode("utf-16")), 400),
    "A4 NUL": (chat("a\x00b"), 400),
    "A4 half a surrogate pair": (chat("\ud800"), 400),
    "A5 a key twice": (chat().replace(b'"temperature": 0', b'"n":1,"n":1,"x":0'), 400),
    "A5 NaN": (chat(temperature=float("nan")), 400),
    "A5 Infinity": (chat(temperature=float("inf")), 400),
    "A5 1e400": (post(CHAT, b'{"temperature":1e400}'), 400),
    "A5 100,000 digits": (post(CHAT, b'{"seed":' + b"9" * 100_000 + b"}"), 400),
    "A5 10,000 arrays": (post(CHAT, b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), 400),
    "A6 text": (post(CHAT, b"{}", kind="text/plain"), 415),
    "A6 a form": (post(CHAT, b"a=b", kind="application/x-www-form-urlencoded"), 415),
    "A6 multipart": (post(CHAT, b"--x--", kind="multipart/form-data; boundary=x"), 415),
    "A6 gzip": (post(CHAT, b"\x1f\x8b\x08", "Content-Encoding: gzip"), 415),
    "A7 length and chunks": (_headers("Content-Length: 3", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
    "A7 two hosts": (_headers("Host: localhost"), 400),
    "A7 a foreign host": (chat().replace(b"localhost", b"evil.example"), 403),
    "A7 a foreign host in the URL": (chat().replace(b" /v1", b" http://evil.example/v1"), 403),
    "A7 no HTTP": (b"\x16\x03\x01\x00\x00\r\n\r\n", 400),
    "A7 a method we do not have": (b"PUT /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "A7 a path we do not have": (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "A10 a path outside": (b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "A10 a model outside": (chat(model="../../etc/passwd"), 404),
}


def test_every_bad_request_gets_its_refusal(server: ServerProcess) -> None:
    for name, (data, status) in BAD.items():
        reply = ask(server, data)
        assert reply.status == status, (name, reply)
        check_told(reply, status)
        assert b"Name three" not in reply.body, name


def test_100_continue_head_absolute_urls_and_pipelines_work(server: ServerProcess) -> None:
    with Client(server.port) as client:
        request = chat("Hi", "Expect: 100-continue")
        head, _, body = request.partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert client.head() == b"HTTP/1.1 100 Continue"
        assert client.send(body).reply().status == 200
        assert b"200 OK" in client.send(HEALTH.replace(b"GET", b"HEAD")).head()
        assert client.send(HEALTH.replace(b"/health", b"http://localhost/health")).reply().status == 200
        client.send(chat("Hi", stream=True) + chat("Hi") + HEALTH)
        assert client.reply().body.endswith(b"data: [DONE]\n\n")
        assert client.reply().json["object"] == "chat.completion"
        assert client.reply().status == 200


def test_slow_heads_and_bodies_end_at_their_deadlines(server: ServerProcess, patience: float) -> None:
    began = time.monotonic()
    with Client(server.port) as head, Client(server.port) as body:
        head.send(HEALTH[:-2])
        body.send(chat()[:-1])
        for client in (head, body):
            check_told(client.reply(), 408, "request_timeout")
            assert client.is_closed()
    assert 1.8 < time.monotonic() - began < 3.0 * patience


def test_a_stream_that_nobody_reads_is_cancelled(server: ServerProcess, patience: float) -> None:
    """About 300 bytes per token against a window of 4 KB: some hundred tokens, then the write timeout."""
    began = time.monotonic()
    with Client(server.port, receive_bytes=4096) as client:
        client.send(chat("Count.", max_tokens=1900, ignore_eos=True, stream=True, logprobs=True, top_logprobs=5))
        until(lambda: "does not read" in server.log, 60 * patience)
        until(lambda: state_of(server)[2] <= 1)  # the neighbour, perhaps
    assert time.monotonic() - began < 60 * patience


def test_requests_beyond_the_queue_are_told_to_come_back(server: ServerProcess, size: Size, patience: float) -> None:
    request = chat("Hi", max_tokens=4, ignore_eos=True)
    clients = [Client(server.port).send(request) for _ in range(size(300, 5000))]
    replies = [client.reply() for client in clients]
    for client in clients:
        client.socket.close()
    assert {reply.status for reply in replies} == {200, 429}
    for reply in replies:
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json["error"]["code"] == "overloaded"
        else:
            assert reply.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("leave", [lambda client: client.socket.close(), Client.reset], ids=["fin", "rst"])
def test_clients_that_leave_in_the_middle_of_anything_leave_nothing_behind(
    server: ServerProcess, leave: Callable[[Client], None]
) -> None:
    request = chat("Hi", max_tokens=200, ignore_eos=True, stream=True)
    for length in (0, 1, 40, len(request) - 1, len(request)):
        for pause_s in (0.0, 0.1):
            client = Client(server.port).send(request[:length])
            time.sleep(pause_s)
            leave(client)
    assert ask(server, HEALTH).status == 200  # what is left behind, the fixture tells
