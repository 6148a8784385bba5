"""Requests that wait while blocks of their prefix come from disk, and the blocks as they come.

A request is held before it starts, for as long as its prefix goes on on disk beyond what the cache has. Its blocks lie
in a sequence of their own meanwhile; then it starts as any other, and finds them. What comes in one step is bounded, so
that requests beside it go on. Knows blocks and tokens; how they are stored, prefix_store knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvarn.engine.persistence.disk_prefixes import DiskPrefixes, DiskStats
from kvarn.kv.cache import KVCache
from kvarn.request import Request

if TYPE_CHECKING:
    from kvarn.prefix_store.reader import ReadJob

STEP_BYTES = 4 << 20  # that one step takes in while requests run: about a millisecond
POLL_S = 0.001  # between looks, while there is nothing else to do
STALLED_S = 2.0  # a disk that gives nothing for so long is slower than computing


@dataclass(slots=True)
class Restore:
    """A request that is held; job: None where another one's blocks are what it waits for."""

    request: Request
    job: ReadJob | None
    awaited: bytes  # the first digest that is not in the cache
    num_tokens: int = 0  # that its sequence holds

    @property
    def sequence(self) -> str:
        return f"restore {self.request.id}"


class Restores:
    """The requests that are held, by id."""

    def __init__(self, kv: KVCache) -> None:
        self.disk: DiskPrefixes | None = None
        self.num_tokens = 0  # restored, ever
        self.num_query_tokens = 0  # looked for on disk
        self.num_bytes = 0
        self._kv = kv
        self._held: dict[str, Restore] = {}
        self._tried: set[str] = set()  # requests that wait again: they start with what has come

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (restore.request for restore in self._held.values())

    def takes(self, request: Request) -> bool:
        """Hold a request that is about to start, if more of its prefix is on disk than in the cache."""
        if self.disk is None or not self.disk.has_blocks:
            return False
        if request.id in self._tried:
            self._tried.discard(request.id)
            return False
        digests = self._kv.digests(request.token_ids, request.prefix_salt)
        num_cached = next((i for i, one in enumerate(digests) if self._kv.find(one) is None), len(digests))
        missing = digests[num_cached:]
        if not missing:
            return False
        if any(missing[0] in restore.job.digests for restore in self._held.values() if restore.job is not None):
            self._held[request.id] = Restore(request, None, missing[0])
            return True
        self.num_query_tokens += len(missing) * self._kv.block_size
        num_stored = self.disk.count(missing)
        if not 0 < num_stored <= self._kv.num_free:
            return False
        restore = Restore(request, self.disk.begin(missing[:num_stored]), missing[0])
        hit = self._kv.lookup(request.token_ids, request.prefix_salt)
        if hit.num_matched:
            self._kv.fork(restore.sequence, hit)
        restore.num_tokens = hit.num_tokens
        self._held[request.id] = restore
        return True

    def advance(self, *, is_bounded: bool) -> list[Request]:
        """Take in what has come; the requests that need not wait any longer. is_bounded: others run."""
        left_bytes = STEP_BYTES if is_bounded else 16 * STEP_BYTES
        for restore in self._held.values():
            if restore.job is not None and left_bytes > 0:
                left_bytes -= self._take_in(restore, restore.job, left_bytes)
        over = [restore for restore in self._held.values() if restore.job is not None and self._is_over(restore.job)]
        for restore in over:
            self._end(restore)
            self._tried.add(restore.request.id)
        awaited = {digest for restore in self._held.values() if restore.job for digest in restore.job.digests}
        free = [one for one in self._held.values() if one.job is None and one.awaited not in awaited]
        for restore in free:
            self._end(restore)
        return [restore.request for restore in over + free]

    def stats(self) -> DiskStats:
        """All figures of the cache on disk; zeros where there is none."""
        if self.disk is None:
            return DiskStats()
        return replace(
            self.disk.stats(),
            query_tokens=self.num_query_tokens,
            hit_tokens=self.num_tokens,
            read_bytes=self.num_bytes,
        )

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False: it is not held."""
        self._tried.discard(request.id)
        restore = self._held.get(request.id)
        if restore is not None:
            self._end(restore)
        return restore is not None

    def give_way(self) -> bool:
        """Free the blocks of one that is held, for a request that runs; False: there are none."""
        for restore in self._held.values():
            if restore.job is not None and self._kv.num_tokens(restore.sequence):
                restore.job.is_cancelled = True
                self._kv.release(restore.sequence)
                return True
        return False

    def _take_in(self, restore: Restore, job: ReadJob, max_bytes: int) -> int:
        assert self.disk is not None
        request, size, num_bytes = restore.request, self._kv.block_size, 0
        taken = []
        while num_bytes < max_bytes and not job.is_cancelled and (content := job.take()) is not None:
            if self._kv.extend(restore.sequence, size) is None:
                job.is_cancelled = True  # no room: it starts with what it has
                break
            self.disk.backend.write_block(int(self._kv.block_ids(restore.sequence)[-1]), content)
            restore.num_tokens += size
            self._kv.publish(restore.sequence, request.token_ids, request.prefix_salt, restore.num_tokens)
            num_bytes += content.nbytes
            taken.append(content)
        self.num_tokens += num_bytes // self.disk.block_bytes * size
        self.num_bytes += num_bytes
        if taken:
            self.disk.taken(taken)
        return num_bytes

    def _is_over(self, job: ReadJob) -> bool:
        assert self.disk is not None
        if not job.is_over and not job.is_ready and time.monotonic() - self.disk.read_at > STALLED_S:
            self.disk.tell_stalled()
            job.is_cancelled = True
        return job.is_over or job.is_cancelled

    def _end(self, restore: Restore) -> None:
        if restore.job is not None:
            restore.job.is_cancelled = True
        self._kv.release(restore.sequence)
        del self._held[restore.request.id]
