"""What a replica tells of its prefix cache: one change after another, as numbers.

    STORED  digest  parent   tokens up to the end of the block     a block became findable behind its parent
    LOST    digest                                                 its content is given up
    NAMED   text    digest                                         requests that begin with this text begin with it

Digests are the first 8 bytes of keyed ones: whoever lacks the key learns nothing from them, and two that happen to be
equal cost a request its cached prefix, never its answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

STORED, LOST, NAMED = 1, 2, 3
ROOT = 0  # the parent of first blocks
MAX_TEXTS = 64  # that name one block; more are left out

_RECORD = struct.Struct("<BQQI")


class PrefixChange(NamedTuple):
    """One change; fields that a kind does not have are 0."""

    kind: int
    digest: int  # NAMED: of the text
    other: int = 0  # STORED: the parent; NAMED: the block
    num_tokens: int = 0


def short_digest(digest: bytes) -> int:
    """A digest as it is told to others."""
    return int.from_bytes(digest[:8], "little")


def pack_changes(changes: Iterable[PrefixChange]) -> bytes:
    """Changes as bytes, 21 each."""
    return b"".join(_RECORD.pack(*change) for change in changes)


def unpack_changes(data: bytes) -> Iterator[PrefixChange]:
    """The other direction; ValueError for bytes that are none."""
    if len(data) % _RECORD.size:
        raise ValueError(f"{len(data)} bytes are no whole number of changes")
    for record in _RECORD.iter_unpack(data):
        if record[0] not in (STORED, LOST, NAMED):
            raise ValueError(f"there is no change of kind {record[0]}")
        yield PrefixChange(*record)
