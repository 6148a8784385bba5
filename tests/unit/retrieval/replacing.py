"""A process that replaces the same documents in Milvus until it is killed, or that freezes in the middle of a change.

Prints the generation of every chunk it finds, as one JSON list, and then each generation once it is stored.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvarn.retrieval.milvus import MilvusIndex
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.types import EmbeddedDocument, TextChunk

DOCUMENTS = 3
CHANGES = ("insert", "upsert", "delete")


class InterruptedConnection(MilvusConnection):
    """A connection at whose n-th changing call something happens: before Milvus has heard of it, or after it was done.

    calls_left: None as long as nothing is to happen.
    """

    def __init__(self, uri: str, interrupt: Callable[[], object], *, is_done: bool = False) -> None:
        super().__init__(uri)
        self.calls_left: int | None = None
        self._interrupt = interrupt
        self._is_done = is_done

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        is_now = False
        if name in CHANGES and self.calls_left is not None:
            self.calls_left -= 1
            is_now = self.calls_left < 0
        if is_now and not self._is_done:
            self._interrupt()
        done = super()._call(name, *args, **options)
        if is_now and self._is_done:
            self._interrupt()
        return done


def main(uri: str, lease_s: str = "3.0", name: str = "c", frozen_at: str = "") -> None:
    """frozen_at: the number of the changing call of the second change before which the process stops itself."""
    connection = InterruptedConnection(uri, lambda: freeze(connection))
    index = MilvusIndex(connection, name, wait_s=20.0, lease_s=float(lease_s))
    found = index.store.chunks([key for key, _ in index.dense(np.ones(2, np.float32), 100, None)])
    generations = sorted(int(chunk.chunk.text) for chunk in found.values())
    print(json.dumps(generations), flush=True)
    generation = max(generations, default=-1) + 1
    while True:
        index.put([entry(generation, number) for number in range(DOCUMENTS)])
        print(generation, flush=True)
        generation += 1
        if frozen_at:
            connection.calls_left, frozen_at = int(frozen_at), ""


def freeze(connection: InterruptedConnection) -> None:
    connection.calls_left = None
    os.kill(os.getpid(), signal.SIGSTOP)


def entry(generation: int, number: int) -> EmbeddedDocument:
    """A document whose text is its generation; it has more chunks every second time."""
    text = str(generation)
    chunks = [TextChunk(text, 0, len(text))] * num_chunks(generation)
    return EmbeddedDocument(
        f"d{number}", "", f"{text} {number}".encode(), {}, chunks, np.ones((len(chunks), 2), np.float32)
    )


def num_chunks(generation: int) -> int:
    return 2 + generation % 2


if __name__ == "__main__":
    main(*sys.argv[1:])
