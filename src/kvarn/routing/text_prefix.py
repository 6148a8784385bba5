"""A request's text in pieces, each known by a keyed digest of all text up to its end: what a router compares.

    head (model, tools, system, ...) | message | message | long message, in chunks | ...
    ────────────────────────────────>t0───────>t1───────>t2───────>t3──────>t4

Equal requests of one API key have equal digests, and a conversation's next turn begins with those of the last. Where
a text ends among the tokens is known to the replica alone, which is told each text's share of the whole.
Knows JSON bodies of all dialects; no tokenizer, no template, no address.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvarn.routing.changes import short_digest
from kvarn.routing.cluster_key import MAC_BYTES, ClusterKey

MAX_SHARE = 65_535  # the whole prompt
CHUNK_BYTES = 1024  # of a longer message
MAX_TEXTS_OF_REQUEST = 4096
FIRST_MARKS, LAST_MARKS = 8, 24  # of the texts that a replica is told
BYTES_PER_TOKEN = 4.0  # before a replica has counted
# Fields that stand in a prompt before the conversation, in any dialect; others leave the prompt as it is.
HEAD_FIELDS = (
    *("model", "cache_salt", "system", "instructions", "tools", "functions", "tool_choice", "response_format"),
    *("chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "think", "template", "suffix"),
    *("input_extra", "retrieval", "lora"),
)
_MARK = struct.Struct("<QH")


@dataclass(frozen=True, slots=True)
class TextPrefix:
    """The texts of one request, from the shortest to the whole."""

    texts: tuple[int, ...]
    ends: tuple[int, ...]  # bytes up to the end of each

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    def num_tokens(self, place: int | None, num_tokens: int) -> float:
        """Estimate the tokens of the whole, of which the text at a place has so many; None: nothing is known."""
        if place is None or not num_tokens:
            return self.num_bytes / BYTES_PER_TOKEN
        return max(num_tokens, num_tokens * self.num_bytes / max(1, self.ends[place]))

    def marks(self) -> tuple[tuple[int, int], ...]:
        """Some of the texts and their shares, the first and the last ones: what a replica is told."""
        shares = [(text, end * MAX_SHARE // self.num_bytes) for text, end in zip(self.texts, self.ends, strict=True)]
        if len(shares) > FIRST_MARKS + LAST_MARKS:
            shares = shares[:FIRST_MARKS] + shares[-LAST_MARKS:]
        return tuple(shares)


class TextHasher:
    """Digests of requests under one cluster key."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key.derive("texts")

    def prefix(self, credential: bytes, body: Mapping[str, Any]) -> TextPrefix | None:
        """The texts of a body; credential: the API key as it was sent, which keeps tenants apart. None: no prompt."""
        pieces = _pieces(body)
        if pieces is None:
            return None
        state = blake2b(digest_size=8, key=self._key)
        state.update(len(credential).to_bytes(8, "little") + credential)
        texts, ends, end = [], [], 0
        for piece in pieces:
            state.update(piece)
            end += len(piece)
            texts.append(short_digest(state.copy().digest()))
            ends.append(end)
            if len(texts) == MAX_TEXTS_OF_REQUEST:
                break
        return TextPrefix(tuple(texts), tuple(ends))


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes] | None:
    """The head, then the conversation or the prompt; None where there is neither."""
    for name in ("messages", "input", "prompt", "input_prefix"):
        content = body.get(name)
        if isinstance(content, str | list) and content:
            return _cut(body, content)
    return None


def _cut(body: Mapping[str, Any], content: str | Sequence[Any]) -> Iterator[bytes]:
    yield _written({name: body[name] for name in HEAD_FIELDS if name in body})
    is_conversation = not isinstance(content, str) and isinstance(content[0], dict)
    for part in content if is_conversation else (content,):
        written = _written(part)
        for start in range(0, len(written), CHUNK_BYTES):
            yield written[start : start + CHUNK_BYTES]


def _written(value: Any) -> bytes:
    """JSON as no client writes it differently; the content of a message comes before its role."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\0"


def write_marks(key: ClusterKey, marks: Sequence[tuple[int, int]]) -> bytes:
    """Marks as the value of a header, with the proof that a router of this cluster made it."""
    data = b"".join(_MARK.pack(*mark) for mark in marks)
    return b64encode(key.mac("marks", data) + data)


def read_marks(key: ClusterKey, value: bytes) -> tuple[tuple[int, int], ...]:
    """The other direction; none where the value is not a router's."""
    try:
        data = b64decode(value, validate=True)
    except (Base64Error, ValueError):
        return ()
    mac, data = data[:MAC_BYTES], data[MAC_BYTES:]
    if len(data) % _MARK.size or len(data) > _MARK.size * (FIRST_MARKS + LAST_MARKS):
        return ()
    return tuple(_MARK.iter_unpack(data)) if key.is_mac(mac, "marks", data) else ()
