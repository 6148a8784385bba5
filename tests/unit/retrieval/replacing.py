"""A process that replaces the same documents in Milvus until it is killed.

Prints the generation of every chunk it finds, as one JSON list, and then each generation once it is stored.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from kvarn.retrieval.milvus import MilvusIndex
from kvarn.retrieval.types import EmbeddedDocument, TextChunk

DOCUMENTS = 3


def main(uri: str) -> None:
    index = MilvusIndex(uri, "c")
    found = index.store.chunks([key for key, _ in index.dense(np.ones(2, np.float32), 100, None)])
    generations = sorted(int(chunk.chunk.text) for chunk in found.values())
    print(json.dumps(generations), flush=True)
    generation = max(generations, default=-1) + 1
    while True:
        index.put([entry(generation, number) for number in range(DOCUMENTS)])
        print(generation, flush=True)
        generation += 1


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
    main(sys.argv[1])
