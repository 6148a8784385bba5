"""The engine's side of the prefix cache on disk: what is worth keeping goes there, and the threads that do it.

A block is kept when it is used a second time: most prompts never come again, and a disk wears with what is written.
Methods are for the engine's thread unless they say otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarn.backends.protocol import BlockBytesBackend
from kvarn.kv.cache import KVCache
from kvarn.kv.prefix import PrefixHit

if TYPE_CHECKING:
    from kvarn.engine.engine import Engine
    from kvarn.prefix_store.folder import StoreFolder
    from kvarn.prefix_store.pack import UInt8
    from kvarn.prefix_store.reader import BlockReader, ReadJob
    from kvarn.prefix_store.store import BlockStore
    from kvarn.prefix_store.writer import BlockWriter

EXPORT_TIMEOUT_S = 60.0
POPULATED_BYTES = 256 << 20  # of the KV cache, at most, backed with memory when a folder with blocks is opened
Call = Callable[[Callable[["Engine"], Any]], Future[Any]]  # run between two steps


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A moment of one model's prefix cache on disk; counts are since the start of the process."""

    query_tokens: int = 0  # prompt tokens that were not in memory and were looked for
    hit_tokens: int = 0  # of these: restored
    read_bytes: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0  # not written: too many at once, gone from memory, or the disk refused
    waiting_blocks: int = 0  # to be written
    num_bytes: int = 0  # of this model's packs
    max_bytes: int = 0  # of the folder


class DiskPrefixes:
    """The blocks of one engine on disk. Until open() has been called there are none."""

    def __init__(self, kv: KVCache, backend: BlockBytesBackend, folder: StoreFolder) -> None:
        self.backend = backend
        self.block_bytes, self.block_size = backend.num_block_bytes(), kv.block_size
        self.folder = folder
        self._kv = kv
        self._parts: tuple[BlockStore, BlockReader, BlockWriter] | None = None
        self._call: Call | None = None
        self._is_busy: Callable[[], bool] = lambda: False
        self._is_closed = False

    @property
    def has_blocks(self) -> bool:
        return self._parts is not None and len(self._parts[0]) > 0

    @property
    def read_at(self) -> float:
        """time.monotonic() when the disk gave the last block, or began."""
        assert self._parts is not None
        return self._parts[1].progress_at

    def open(self, store: BlockStore) -> None:
        """Use a store. Any thread; without effect on one that is closed."""
        if self._is_closed:
            return
        from kvarn.prefix_store.reader import BlockReader
        from kvarn.prefix_store.writer import BlockWriter

        parts = store, BlockReader(store), BlockWriter(store, self.folder.failures)
        if self._call is not None:
            parts[2].start(self._export_between_steps, self._is_busy)
        self._parts = parts
        # The first touch of memory takes as long as a MAC over it, so blocks that will come have theirs before they do.
        if count := min(len(store), POPULATED_BYTES // self.block_bytes, self._kv.num_blocks // 2):
            threading.Thread(target=self.backend.populate_blocks, args=(count,), name="kvarn-prefix-memory").start()

    def start(self, call: Call, is_busy: Callable[[], bool]) -> None:
        """Begin to write; call runs a function on the engine's thread."""
        self._call, self._is_busy = call, is_busy
        if self._parts is not None:
            self._parts[2].start(self._export_between_steps, is_busy)

    def used(self, hit: PrefixHit) -> None:
        """A request starts on blocks that another one computed: they are worth keeping."""
        if self._parts is not None and hit.digests:
            store, _, writer = self._parts
            writer.offer(hit.digests, hit.tenant)
            store.touch(hit.digests)

    def count(self, digests: Sequence[bytes]) -> int:
        """How many of the first of these are on disk."""
        return 0 if self._parts is None else self._parts[0].count(digests)

    def begin(self, digests: Sequence[bytes]) -> ReadJob:
        assert self._parts is not None
        return self._parts[1].begin(digests)

    def taken(self, contents: Sequence[UInt8]) -> None:
        """Blocks that were read are in the cache now, as copies."""
        if self._parts is not None:
            self._parts[1].taken(contents)

    def tell_stalled(self) -> None:
        self.folder.failures.tell("the disk gives no answer", "what it holds is computed again")

    def stats(self) -> DiskStats:
        """What the threads have done and what there is; restores.py adds what requests found."""
        if self._parts is None:
            return DiskStats(max_bytes=self.folder.max_bytes)
        store, _, writer = self._parts
        return DiskStats(
            written_bytes=store.num_written * self.block_bytes,
            dropped_blocks=writer.num_dropped,
            waiting_blocks=writer.num_waiting,
            num_bytes=store.num_bytes,
            max_bytes=self.folder.max_bytes,
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written; False: it took too long. Any thread but the engine's."""
        give_up_at = time.monotonic() + timeout_s
        while self._parts is None or self._parts[2].num_waiting:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """End the threads; what waits to be written still is, for a moment."""
        self._is_closed = True
        parts, self._parts = self._parts, None
        if parts is not None:
            parts[1].close()
            parts[2].close(self._export)

    def _export(self, digests: Sequence[bytes]) -> list[tuple[bytes, UInt8]]:
        """Copies of those blocks that are still in the cache."""
        found = [(digest, self._kv.find(digest)) for digest in digests]
        return [(digest, self.backend.read_block(block_id)) for digest, block_id in found if block_id is not None]

    def _export_between_steps(self, digests: Sequence[bytes]) -> list[tuple[bytes, UInt8]]:
        """The same, on the writer's thread."""
        assert self._call is not None
        found: list[tuple[bytes, UInt8]] = self._call(lambda _: self._export(digests)).result(EXPORT_TIMEOUT_S)
        return found
