"""Requests that have not ended: waiting, forked, held and running ones, and every move between the four.

A preempted request gives its blocks back and waits again. Knows states and blocks; does not decide who moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kvarn.backends.batch import BlockCopy
from kvarn.decoding.decoder import Decoder, Span
from kvarn.engine.persistence.restores import POLL_S, Restores
from kvarn.engine.scheduling.forks import ForkGroups
from kvarn.engine.scheduling.kv_allocation import KVAllocation
from kvarn.engine.scheduling.layerwise_prefill import LayerwisePrefill
from kvarn.engine.scheduling.queue import KeyOf, RequestQueue
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class LiveRequests:
    """Waiting, forked, held and running requests over one KV cache."""

    def __init__(
        self, decoder: Decoder, kv: KVCache, layerwise: LayerwisePrefill, order: KeyOf, restores: Restores
    ) -> None:
        self.waiting = RequestQueue(order)
        self.forks = ForkGroups()
        self.restores = restores  # held: blocks of theirs come from disk
        self.running: dict[str, Request] = {}
        self.allocation = KVAllocation(kv, decoder)
        self.kv = kv
        self.layerwise = layerwise
        self.num_preemptions = 0
        self._decoder = decoder

    def __iter__(self) -> Iterator[Request]:
        return chain(self.waiting, self.forks, self.restores, self.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.forks) + len(self.restores)

    @property
    def restoring_s(self) -> float:
        """How long there is nothing to do but to wait for the disk."""
        return POLL_S if self.restores and not (self.waiting or self.running) else 0.0

    @property
    def num_spare_slots(self) -> int:
        """Of the cache: beside those that running requests may take with their next tokens and copies."""
        return (min(group.pool.num_free for group in self.kv.groups) - 3 * len(self.running)) * self.kv.block_size

    def add(self, request: Request) -> None:
        """Queue a request; one that forks another waits for that one's prompt."""
        leader = request.fork_of
        if leader is not None and not leader.is_ended and leader.num_computed < leader.num_prompt:
            self.forks.add(leader, request)
        else:
            self.waiting.push(request)

    def queue_restored(self) -> None:
        """Take in blocks that have come from disk; requests whose last one has wait for their start again."""
        for request in self.restores.advance(is_bounded=bool(self.running)) if self.restores else ():
            self.waiting.push(request)

    def extend(self, span: Span) -> Sequence[BlockCopy] | None:
        """Allocate blocks for what a span reads and writes; those that are held give way. None: there are too few."""
        while (copies := self.allocation.extend(span)) is None and self.restores.give_way():
            pass
        return copies

    def start(self, request: Request, num_computed: int) -> None:
        """Run a request whose first num_computed tokens lie in the cache."""
        request.start(num_computed)
        self.running[request.id] = request

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, keeps its tokens and will give the same answer."""
        del self.running[request.id]
        self.layerwise.leave(request)
        self.allocation.release(request, forget=request.params.free_cache_on_finish)
        self._decoder.restart(request)
        request.preempt()
        self.num_preemptions += 1
        self.waiting.push(request)

    def start_forks(self, leader: Request, max_running: int) -> Iterator[Request]:
        """The leader's prompt is computed: start its other choices on it, or queue them when too many run."""
        for follower in self.forks.take(leader):
            num_shared = leader.num_prompt - 1
            if num_shared == 0 or len(self.running) >= max_running or not self.kv.can_fork(leader.id, num_shared):
                self.waiting.push(follower)
                continue
            self.kv.fork(follower.id, leader.id, num_shared)
            yield follower

    def reap(self, now: float) -> list[Request]:
        """End the requests that were cancelled or are overdue."""
        ended = [request for request in self if request.is_cancel_requested or request.deadline_at <= now]
        for request in ended:
            if request.is_cancel_requested:
                request.cancel()
            else:
                request.expire()
            self.remove(request)
        return ended

    def remove(self, request: Request, *, forget_blocks: bool = False) -> None:
        """Remove an ended request; if others wait for its prompt, the first of them leads the rest."""
        self.layerwise.leave(request)
        if self.running.pop(request.id, None) is None:
            if request in self.waiting:
                self.waiting.remove(request)
            elif not self.restores.discard(request):
                self.forks.discard(request)
        self.allocation.release(request, forget=forget_blocks or request.params.free_cache_on_finish)
        self._decoder.forget(request)
        followers = self.forks.take(request)
        for follower in followers[1:]:
            self.forks.add(followers[0], follower)
        if followers:
            self.waiting.push(followers[0])
