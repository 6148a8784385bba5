"""Who runs next: plan() before the computation, apply() after it. Knows spans and blocks, never a tensor.

First come, first served. A request starts only when the cache can hold its longest possible answer beside those of
the running ones, so a running request never has to give its blocks back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Commit, Decoder, Span
from kvarn.engine.plan import Plan, make_plan
from kvarn.errors import KvarnError
from kvarn.kv.cache import KVCache
from kvarn.request import Finish, Request


class Scheduler:
    """Waiting and running requests over one KV cache."""

    def __init__(self, decoder: Decoder, kv: KVCache, config: EngineConfig) -> None:
        self._decoder = decoder
        self._kv = kv
        self._max_batch_tokens = config.max_batch_tokens
        self._max_running = config.max_running
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self) -> Plan:
        """Decodes first, then prompt chunks in order of arrival, within the token budget."""
        self._admit()
        spans, tables, copies = [], [], []
        budget = self._max_batch_tokens
        for request in sorted(self._running, key=_is_prefilling):
            span = self._decoder.span(request, budget) if budget else None
            if span is None:
                continue
            copied = self._kv.extend(request.id, span.end - self._kv.num_tokens(request.id))
            assert copied is not None, "the blocks of a running request were reserved"
            spans.append(span)
            copies.extend(copied)
            tables.append(self._kv.block_ids(request.id))
            budget -= len(span.token_ids)
        return make_plan(spans, tables, copies)

    def apply(self, commits: Iterable[Commit], finishes: Sequence[Finish | None]) -> None:
        """Take what the step gave: tokens, then ends, and the blocks of the ended ones back."""
        for commit, finish in zip(commits, finishes, strict=True):
            request = commit.request
            request.num_computed += commit.num_computed
            for token in commit.tokens:
                request.append(token.token_id)
                if token.logprob is not None:
                    request.logprobs.append(token.logprob)
            if commit.error is not None:
                self.fail(request, commit.error)
            elif finish is not None:
                request.finish(finish)
                self._forget(request)

    def abandon(self, spans: Iterable[Span]) -> None:
        """Undo plan() after an interrupted step: nothing of it counts as computed."""
        for span in spans:
            if not span.request.is_ended:
                self._kv.trim(span.request.id, span.request.num_computed)

    def fail(self, request: Request, error: KvarnError) -> None:
        request.fail(error)
        self._forget(request)

    def reap_cancelled(self) -> list[Request]:
        """End the requests whose cancellation was asked for, in whatever state they are."""
        cancelled = [r for r in (*self._waiting, *self._running) if r.is_cancel_requested]
        for request in cancelled:
            request.cancel()
            self._forget(request)
        return cancelled

    def has_room(self, num_tokens: int) -> bool:
        """Whether num_tokens fit beside the longest answers of the running requests."""
        reserved = sum(self._kv.blocks_for(request.max_total_tokens) for request in self._running)
        return reserved + self._kv.blocks_for(num_tokens) <= self._kv.num_blocks

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            if not self.has_room(self._waiting[0].max_total_tokens):
                return
            request = self._waiting.popleft()
            request.start()
            self._running.append(request)

    def _forget(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._kv.release(request.id)
        self._decoder.forget(request)


def _is_prefilling(request: Request) -> bool:
    return request.num_computed + 1 < len(request.token_ids)
