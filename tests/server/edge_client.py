"""Raw sockets for tests of the edge: bytes out, responses in, nothing a decent HTTP client would insist on."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

TIMEOUT_S = 60.0  # of a socket: only what hangs gets there
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One response, with the bytes that came after it."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    rest: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Client:
    """One connection."""

    def __init__(self, port: int, timeout_s: float = TIMEOUT_S, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(timeout_s)
        self.socket.connect(("127.0.0.1", port))
        self._left = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def try_send(self, data: bytes) -> bool:
        """False: the server has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def reply(self) -> Reply:
        """The next response."""
        while b"\r\n\r\n" not in self._left:
            self._more()
        head, _, rest = self._left.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        status = int(lines[0].split()[1])
        self._left = rest
        if headers.get("transfer-encoding") == "chunked":
            body = self._chunks()
        else:
            body = self._exactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    def head(self) -> bytes:
        """The next head alone, as it is: 100 Continue, or the response to HEAD."""
        while b"\r\n\r\n" not in self._left:
            self._more()
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        return head

    def everything(self) -> bytes:
        """All that comes until the connection ends."""
        while data := self.socket.recv(1 << 16):
            self._left += data
        return self._left

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False: something came instead."""
        try:
            return not self._left and self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing comes, not even the end."""
        self.socket.settimeout(seconds)
        try:
            return not self._left and self.socket.recv(1) == b"" and False
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _chunks(self) -> bytes:
        parts = []
        while True:
            while b"\r\n" not in self._left:
                self._more()
            size, _, self._left = self._left.partition(b"\r\n")
            parts.append(self._exactly(int(size, 16)))
            self._exactly(2)
            if not parts[-1]:
                return b"".join(parts)

    def _exactly(self, num_bytes: int) -> bytes:
        while len(self._left) < num_bytes:
            self._more()
        data, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return data

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError(f"the server closed the connection after {self._left[:200]!r}")
        self._left += data


class EdgeServer:
    """tests.server.edge_app in its own process, with the settings given."""

    def __init__(self, **settings: object) -> None:
        command = [sys.executable, "-m", "tests.server.edge_app", json.dumps(settings)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self._errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()
        until(self._answers)

    def __enter__(self) -> EdgeServer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return "".join(self._errors)

    def client(self, **options: Any) -> Client:
        return Client(self.port, **options)

    def ask(self, data: bytes) -> Reply:
        """One connection, one request, one response."""
        with self.client() as client:
            return client.send(data).reply()

    def get(self, path: str) -> Reply:
        return self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())

    def figures(self) -> dict[str, int]:
        return dict(self.get("/figures").json)

    def _answers(self) -> bool:
        try:
            return self.get("/health").status == 200
        except OSError:
            return False

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)


class Neighbour:
    """Somebody else, who streams on one connection all the time and must not notice anything."""

    NUM_TOKENS = 20

    def __init__(self, server: EdgeServer) -> None:
        self._client = server.client()
        self._ends = threading.Event()
        self._streams: list[bytes] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Stop listening; every stream was what it should be."""
        self._ends.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert self._streams
        assert set(self._streams) == {expected_tokens(self.NUM_TOKENS)}, self._streams[-1]

    def _listen(self) -> None:
        request = f"GET /tokens?n={self.NUM_TOKENS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with self._client as client:
            while not self._ends.is_set():
                try:
                    self._streams.append(client.send(request).reply().body)
                except (OSError, ValueError) as error:
                    self._streams.append(repr(error).encode())
                    return


@contextmanager
def undisturbed(server: EdgeServer) -> Iterator[None]:
    """Whatever happens inside: the process lives, a neighbour's streams are right, and nothing stays behind."""
    before, logged = server.figures(), len(server.log)
    neighbour = Neighbour(server)
    yield
    neighbour.check()
    assert server.process.poll() is None, server.log
    kept = ("fds", "tasks", "open", "body_bytes")
    until(lambda: [server.figures()[name] for name in kept] == [before[name] for name in kept])
    assert "Traceback" not in server.log[logged:]


def check_told(reply: Reply, status: int, code: str | None = None) -> None:
    """The response is a refusal in OpenAI's shape, and gives nothing away."""
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.headers["x-request-id"]) == 32
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "permission_error", "api_error")
    assert code is None or error["code"] == code
    for secret in (b"Traceback", b"/srv", b"/work", b"site-packages", b"0x", b"sk-kvarn", b".py"):
        assert secret not in reply.body


def post(path: str, body: bytes, *more: str, kind: str | None = "application/json") -> bytes:
    """A request with a body and its length."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *more]
    if kind is not None:
        lines.append(f"Content-Type: {kind}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def expected_tokens(count: int) -> bytes:
    """What /tokens streams."""
    return b"".join(f"data: token {number}\n\n".encode() for number in range(count))
