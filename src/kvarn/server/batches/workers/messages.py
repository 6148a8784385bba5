"""What `kvarn batch` and its workers tell each other: frozen messages, pickled, over one socket for each worker.

    kvarn batch ──Begin, Ask, Ask, ...──> worker
    kvarn batch <──Started, Answered, ...── worker, and Beat every second

Both ends are the same program on one machine, and nobody else has the socket.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass

from kvarn.engine.process.messages import PackedError
from kvarn.server.batches.in_process import BatchAnswer
from kvarn.server.process.settings import ServerConfig

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message: what to load, and how."""

    config: ServerConfig


@dataclass(frozen=True, slots=True)
class Started:
    """Everything is loaded, or why it is not."""

    error: PackedError | None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """Its response."""

    number: int
    answer: BatchAnswer


@dataclass(frozen=True, slots=True)
class Beat:
    """Still there."""


BEAT_S = 1.0
Message = Begin | Started | Ask | Answered | Beat


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next one; None: the other end is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: Message = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return message


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Hand it to the socket, which sends when it can."""
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)
