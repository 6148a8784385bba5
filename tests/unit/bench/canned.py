"""A server on a real socket that answers every request with bytes a test has written, whatever it is."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = Sequence[bytes | float]  # bytes to send; numbers are seconds to wait in between
OnRequest = Callable[[int, bytes], Answer]  # (number of the request, its head and body)


class CannedServer:
    """`with CannedServer(lambda number, request: ...) as url:`; requests has what was sent."""

    def __init__(self, on_request: OnRequest) -> None:
        self.requests: list[bytes] = []
        self.times: list[float] = []
        self.num_connections = 0
        lock = threading.Lock()

        class Talk(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(talk) -> None:
                with lock:
                    self.num_connections += 1
                while (request := _read_request(talk.rfile)) is not None:
                    with lock:
                        number = len(self.requests)
                        self.requests.append(request)
                        self.times.append(time.monotonic())
                    for part in on_request(number, request):
                        if isinstance(part, bytes):
                            talk.wfile.write(part)
                        elif part < 0:
                            return  # hang up
                        else:
                            time.sleep(part)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients of these tests go away in the middle

        self._server = Server(("127.0.0.1", 0), Talk)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> CannedServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self) -> list[dict[str, Any]]:
        """The JSON of every request that had a body."""
        return [json.loads(body) for request in self.requests if (body := request.partition(b"\r\n\r\n")[2])]


HANG_UP = -1.0
MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 2048}, {"id": "other"}]}


def reply(status: int, body: Any, *headers: str) -> bytes:
    """A whole JSON answer."""
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


def refused(status: int, message: str, *headers: str, code: str | None = None) -> bytes:
    return reply(status, {"error": {"message": message, "type": "x", "param": None, "code": code}}, *headers)


def stream_head() -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(data: Any) -> bytes:
    """One server-sent event as a chunk of the body."""
    text = data if isinstance(data, str) else json.dumps(data)
    return chunk(f"data: {text}\n\n".encode())


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def said(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def ended(prompt_tokens: int, completion_tokens: int) -> list[bytes]:
    """Finish reason, usage, [DONE] and the end of the body."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    stop = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
    return [stop, event({"choices": [], "usage": usage}), event("[DONE]"), b"0\r\n\r\n"]


def _read_request(file: Any) -> bytes | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = file.readline()
        if not line:
            return None
        head += line
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + bytes(file.read(length))
