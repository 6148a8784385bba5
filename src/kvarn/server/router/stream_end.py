"""Streams that pass through: whole events only, and in each dialect the last one when a replica is lost meanwhile."""

from __future__ import annotations

import json
import re

from kvarn.server.api.anthropic import errors as anthropic
from kvarn.server.api.anthropic.routes import STREAM_FORMAT as ANTHROPIC_FORMAT
from kvarn.server.api.llama_server.infill_writer import event_bytes
from kvarn.server.api.ollama import errors as ollama
from kvarn.server.api.ollama.writer import line_bytes
from kvarn.server.api.openai import errors as openai
from kvarn.server.api.openai.chat_stream import STREAM_FORMAT as OPENAI_FORMAT
from kvarn.server.api.responses import errors as responses
from kvarn.server.failures import Failure

MAX_HELD_BYTES = 1 << 20  # of an event that does not end
EVENTS, LINES = b"text/event-stream", b"application/x-ndjson"
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class StreamTail:
    """Cuts a stream at the ends of its events: half of one could not be taken back when the rest never comes."""

    def __init__(self, media_type: bytes) -> None:
        self._end = b"\n\n" if media_type.startswith(EVENTS) else b"\n"
        self._held = b""
        self.last = b""  # what was sent last

    @staticmethod
    def of(media_type: bytes) -> StreamTail | None:
        """None: a body that is no stream."""
        return StreamTail(media_type) if media_type.startswith((EVENTS, LINES)) else None

    def push(self, data: bytes) -> bytes:
        """What can be sent now; a replica writes whole events, so that is nearly always all."""
        data = self._held + data if self._held else data
        if data.endswith(self._end) or len(data) > MAX_HELD_BYTES:
            self._held = b""
        else:
            whole = data.rfind(self._end) + len(self._end) if self._end in data else 0
            self._held, data = data[whole:], data[:whole]
        self.last = data or self.last
        return data

    @property
    def rest(self) -> bytes:
        """What is left at the end of a stream that ended as it should."""
        return self._held


def last_event(path: str, failure: Failure, before: bytes) -> bytes:
    """The error with which a stream of a path ends; before: the last bytes of it that were sent."""
    if anthropic.is_path(path):
        return ANTHROPIC_FORMAT.error_event(failure) + ANTHROPIC_FORMAT.done
    if ollama.is_path(path):
        return line_bytes(ollama.error_body(failure))
    if path == responses.PATH:
        number = max((int(one) for one in _NUMBER.findall(before)), default=-1) + 1
        event = {"type": "error", "code": failure.code, "message": failure.message, "param": None}
        return b"event: error\ndata: " + json.dumps(event | {"sequence_number": number}).encode() + b"\n\n"
    if path == "/infill":
        return event_bytes(openai.error_body(failure))
    return OPENAI_FORMAT.error_event(failure) + OPENAI_FORMAT.done
