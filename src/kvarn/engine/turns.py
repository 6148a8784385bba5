"""Whose turn it is among the running requests: low priorities sit out steps, prompts get rows by time.

Knows priorities and times; knows no block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvarn.config import EngineConfig
from kvarn.decoding.decoder import Span
from kvarn.engine.pacing import BackgroundShare, Pacer
from kvarn.engine.policy import Policy
from kvarn.request import Clock, Request


@dataclass(frozen=True, slots=True)
class Turn:
    """Who takes part in one step."""

    decodes: Sequence[Request]  # least recently served first
    prompts: Sequence[Request]
    num_disturbed: int  # decodes that prompt rows would slow down; low priorities are no reason to hold a prompt back


class Turns:
    """Takes turns between running requests, and learns from each step."""

    def __init__(self, policy: Policy, pacer: Pacer, config: EngineConfig, clock: Clock) -> None:
        self._policy = policy
        self._pacer = pacer
        self._clock = clock
        self._share = BackgroundShare(config.background_share, config.prefill_ms / 1000)
        self._background: frozenset[str] = frozenset()
        self._num_steps = 0

    def take(self, running: Collection[Request]) -> Turn:
        """Choose who takes part in the next step."""
        self._background = self._find_background(running)
        if not self._background:
            self._share.reset()
        active = [r for r in running if r.id not in self._background or self._share.may_run]
        decodes = [request for request in active if not request.is_prefilling]
        decodes.sort(key=lambda request: request.served_in)
        prompts = [request for request in active if request.is_prefilling]
        return Turn(decodes, prompts, sum(request.id not in self._background for request in decodes))

    def includes(self, request: Request, running: Collection[Request]) -> bool:
        """Whether a request that has just started takes part at once."""
        if self._share.may_run:
            return True
        top = max(other.priority for other in running)
        return request.priority >= top or not self._policy.is_background(request, top, self._clock())

    def observe(self, spans: Sequence[Span], seconds: float, slow: Request | None = None, slow_s: float = 0.0) -> None:
        """Learn from a step that was just done; slow_s of its seconds went into a chunk of slow's prompt."""
        self._num_steps += 1
        for request in [span.request for span in spans] + ([] if slow is None else [slow]):
            request.served_in = self._num_steps
        if self._background:
            background_s = self._background_s(spans, seconds - slow_s)
            if slow is not None and slow.id in self._background:
                background_s += slow_s
            self._share.settle(seconds, background_s)
        if spans:
            self._pacer.observe(*_count(spans), seconds - slow_s)

    def _find_background(self, running: Collection[Request]) -> frozenset[str]:
        top = max((request.priority for request in running), default=0)
        lower = [request for request in running if request.priority < top]
        if not lower:
            return frozenset()
        now = self._clock()
        return frozenset(request.id for request in lower if self._policy.is_background(request, top, now))

    def _background_s(self, spans: Sequence[Span], seconds: float) -> float:
        """What low priorities took from the others: what the step lasted longer than it would have without them."""
        higher = [span for span in spans if span.request.id not in self._background]
        if not higher or len(higher) == len(spans):
            return 0.0
        expected_s = self._pacer.expected_s(*_count(higher))
        if expected_s is not None:
            return max(0.0, seconds - expected_s)
        return seconds * (1 - sum(_count(higher)) / sum(_count(spans)))


def _count(spans: Sequence[Span]) -> tuple[int, int]:
    """Decodes and prompt rows; a single row from which nothing is chosen belongs to a prompt."""
    num_rows = sum(len(span.token_ids) for span in spans)
    num_decodes = sum(len(span.token_ids) == 1 and bool(span.outputs) for span in spans)
    return num_decodes, num_rows - num_decodes
