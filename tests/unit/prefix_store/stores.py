"""Small stores of blocks of random bytes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvarn.prefix_store.folder import StoreFolder
from kvarn.prefix_store.store import BlockStore, BlockToStore

BLOCK_BYTES = 4096
IDENTITY = b"a model"
LARGE = 64 << 20


def opened(path: Path, max_bytes: int = LARGE, identity: bytes = IDENTITY) -> BlockStore:
    """A store as a new process sees it."""
    return BlockStore(StoreFolder(path, max_bytes), identity, BLOCK_BYTES, {"model": "test"})


def closed(store: BlockStore) -> None:
    """As a process leaves it."""
    store.folder.close()


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def block(number: int, tenant: str = "") -> BlockToStore:
    content = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)
    return BlockToStore(digest(number), tenant, content)


def blocks(numbers: Iterable[int], tenant: str = "") -> list[BlockToStore]:
    return [block(number, tenant) for number in numbers]


def has(store: BlockStore, number: int) -> bool:
    """Whether a block comes back, which it does as it was written or not at all."""
    content = store.read(digest(number))
    assert content is None or np.array_equal(content, block(number).content), "another block than was written"
    return content is not None


def packs(path: Path) -> list[Path]:
    return sorted(path.glob("*/*/*.pack"))


def size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
