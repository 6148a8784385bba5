"""A process that ingests until it is killed: prints the number of each batch once it is committed."""

from __future__ import annotations

import sys
from pathlib import Path

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.storage import index_sync
from kvarn.retrieval.types import Document
from tests.unit.retrieval.words import WordEmbedder

BATCH = 8


def main(folder: str, first: int) -> None:
    index_sync.MIN_CHECKPOINT_CHUNKS = 20  # so that kills also fall into the writing of graph and manifest
    collection = Collection("c", folder=Path(folder), model=WordEmbedder(dim=16))
    print("open", flush=True)
    batch = first
    while True:
        documents = [document(batch, number) for number in range(BATCH)]
        collection.add(documents)
        if batch % 3 == 2:
            collection.delete([f"b{batch - 1}-0"])
        print(batch, flush=True)
        batch += 1


def document(batch: int, number: int) -> Document:
    return Document(f"batch{batch} item{number} common words", id=f"b{batch}-{number}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
