"""Requests that have not ended: waiting, forked and running ones, and every move between the three.

A preempted request gives its blocks back and waits again. Knows states and blocks; does not decide who moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvarn.decoding.decoder import Decoder
from kvarn.engine.scheduling.forks import ForkGroups
from kvarn.engine.scheduling.kv_allocation import KVAllocation
from kvarn.engine.scheduling.layerwise_prefill import LayerwisePrefill
from kvarn.engine.scheduling.queue import KeyOf, RequestQueue
from kvarn.kv.cache import KVCache
from kvarn.request import Request


class LiveRequests:
    """Waiting, forked and running requests over one KV cache."""

    def __init__(self, decoder: Decoder, kv: KVCache, layerwise: LayerwisePrefill, order: KeyOf) -> None:
        self.waiting = RequestQueue(order)
        self.forks = ForkGroups()
        self.running: dict[str, Request] = {}
        self.allocation = KVAllocation(kv, decoder)
        self.kv = kv
        self.layerwise = layerwise
        self.num_preemptions = 0
        self._decoder = decoder

    def __iter__(self) -> Iterator[Request]:
        return chain(self.waiting, self.forks, self.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.forks)

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
            else:
                self.forks.discard(request)
        self.allocation.release(request, forget=forget_blocks or request.params.free_cache_on_finish)
        self._decoder.forget(request)
        followers = self.forks.take(request)
        for follower in followers[1:]:
            self.forks.add(followers[0], follower)
        if followers:
            self.waiting.push(followers[0])
