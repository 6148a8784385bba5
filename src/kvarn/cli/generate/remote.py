"""A model behind an OpenAI-compatible server, with the part of kvarn.LLM's interface that a chat session needs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from kvarn.bench.connection import Address, error_text
from kvarn.cli.generate.cited_sources import read_citations, read_sentences
from kvarn.errors import RequestError
from kvarn.types import Completion, FinishReason, Message, SamplingParams, Timings, TokenEvent, Usage

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0  # a stream without a byte for this long, not even a comment, is given up
MAX_LINE_BYTES = 16 << 20
MAX_ERROR_BYTES = 1 << 20


class RemoteModel:
    """One model of one server."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """Look the model up; without a name, take the first that the server lists."""
        self._address = Address.of(url)
        self._key = api_key
        entries = self._list_models()
        entry = next((entry for entry in entries if model in (None, entry.get("id"))), None)
        if entry is None:
            listed = ", ".join(str(entry.get("id")) for entry in entries) or "none"
            raise RequestError(f"the server has no model {model!r:.80}; it lists {listed:.400}")
        self.name = str(entry.get("id"))
        self.collection: str | None = None  # of the server, that answers are grounded in
        context = entry.get("max_model_len")
        self.context = context if isinstance(context, int) else None

    def stream(self, messages: Sequence[Message], params: SamplingParams, /) -> RemoteStream:
        """Request an answer; its events come as the server sends them."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        for name in ("max_tokens", "temperature", "top_p", "seed"):
            if (value := getattr(params, name)) is not None:
                body[name] = value
        if self.collection is not None:
            body["retrieval"] = {"collection": self.collection}
        connection, response = self._request("POST", "/v1/chat/completions", body)
        return RemoteStream(connection, response)

    def _list_models(self) -> list[dict[str, Any]]:
        connection, response = self._request("GET", "/v1/models")
        try:
            listing = json.loads(response.read(MAX_LINE_BYTES))
            return [entry for entry in listing["data"] if isinstance(entry, dict)]
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            raise RequestError("the server's /v1/models is not a list of models; is it OpenAI-compatible?") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        return open_response(self._address, self._key, method, path, body)


def open_response(
    address: Address, key: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[HTTPConnection, HTTPResponse]:
    """Ask a server; the response is to be read, and the connection closed. RequestError: why it did not answer."""
    connection_class = HTTPSConnection if address.is_secure else HTTPConnection
    connection = connection_class(address.host, address.port, timeout=CONNECT_TIMEOUT_S)
    headers = {"user-agent": "kvarn-chat"}
    if body is not None:
        headers["content-type"] = "application/json"
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT_S)
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, address.prefix + path, content, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
    except (OSError, HTTPException, ValueError) as error:
        connection.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RequestError(f"{address.host_header} did not answer: {reason}; is a server running there?") from None
    except RequestError:
        connection.close()
        raise
    return connection, response


class RemoteStream:
    """Events of one answer; the last one has the whole of it. Closing it early cancels the request on the server."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self._socket: socket.socket | None = connection.sock
        self._is_cancelled = False
        self._started = time.monotonic()
        self._first_at: float | None = None
        self._texts: list[str] = []
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self._retrieval: dict[str, Any] = {}

    def __iter__(self) -> Iterator[TokenEvent]:
        for chunk in self._chunks():
            text = self._take(chunk)
            if text:
                self._first_at = self._first_at or time.monotonic()
                self._texts.append(text)
                yield TokenEvent(text, None, len(self._texts) - 1)
        completion = self._completion()
        yield TokenEvent("", None, len(self._texts), completion.finish_reason, completion=completion)

    def cancel(self) -> None:
        """End the answer: the next event is the last, with the text so far. Safe in a signal handler."""
        self._is_cancelled = True
        if self._socket is not None:
            with suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks of the stream, up to [DONE] or a cancellation."""
        while not self._is_cancelled:
            try:
                line = self._response.readline(MAX_LINE_BYTES)
            except (OSError, HTTPException, ValueError) as error:
                line, reason = b"", f"{type(error).__name__}: {error}"
            else:
                reason = "it ended without [DONE]"
            if not line and not self._is_cancelled:
                raise RequestError(f"the server's stream broke off ({reason}); ask again")
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield _json_object(data)

    def _take(self, chunk: dict[str, Any]) -> str:
        """Record one chunk and return its text."""
        if chunk.get("error"):
            raise RequestError(error_text(chunk))
        self._usage = chunk.get("usage") or self._usage
        if isinstance(retrieval := chunk.get("retrieval"), dict):
            self._retrieval = retrieval  # the last one also says what supports the answer
        choices = chunk.get("choices") or [{}]
        self._finish = choices[0].get("finish_reason") or self._finish
        delta = choices[0].get("delta") or {}
        text = delta.get("content") or ""
        return text if isinstance(text, str) else ""

    def _completion(self) -> Completion:
        now = time.monotonic()
        first_at = self._first_at or now
        known = {reason.value: reason for reason in FinishReason}
        finish = FinishReason.CANCELLED if self._is_cancelled else known.get(self._finish or "", FinishReason.STOP)
        num_tokens = int(self._usage.get("completion_tokens") or len(self._texts))
        usage = Usage(int(self._usage.get("prompt_tokens") or 0), num_tokens)
        timings = Timings(0.0, first_at - self._started, now - first_at, first_at - self._started)
        citations, sentences = read_citations(self._retrieval), read_sentences(self._retrieval)
        text = "".join(self._texts)
        return Completion(text, (), finish, usage, timings, seed=0, citations=citations, sentences=sentences)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError("the server sent an event that is not a JSON object; is it OpenAI-compatible?")
    return parsed


def _refusal(response: HTTPResponse) -> RequestError:
    try:
        body = json.loads(response.read(MAX_ERROR_BYTES))
    except ValueError:
        body = {"error": response.reason}
    message = f"the server refused ({response.status}): {error_text(body)}"
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
        message += "; /reset starts anew"
    return RequestError(message)
