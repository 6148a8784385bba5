"""How hidden states become tokens: the two hooks every way of generating fills in.

Each step a request asks for a *span* of positions to compute; afterwards it reports what it *committed*. Prefill
chunk: span n, commits 0. Autoregressive: span 1, commits 1. The scheduler never asks what kind of model it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvarn.backends.protocol import Hidden
from kvarn.errors import KvarnError
from kvarn.request import Request
from kvarn.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start .. start + len(token_ids) of one request; outputs are offsets whose hidden state is wanted."""

    request: Request
    start: int
    token_ids: Sequence[int]
    outputs: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CommittedToken:
    token_id: int
    logprob: TokenLogprob | None = None
    ends_answer: bool = False  # a constraint is satisfied, and nothing may follow


@dataclass(frozen=True, slots=True)
class Commit:
    """What one request gained: num_computed positions now in the cache, and tokens of the answer."""

    request: Request
    num_computed: int
    tokens: tuple[CommittedToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens that follow the computed ones, if asked for
    error: KvarnError | None = None


class Decoder(Protocol):
    """One way of generating."""

    backend_s: float  # seconds that commit() has spent in the backend, ever

    def span(self, request: Request, budget: int) -> Span | None:
        """The positions to compute next, at most budget of them; None: nothing that fits."""

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        """Choose tokens; hidden holds the output rows of all spans in order. One Commit per span, same order."""

    def forget(self, request: Request) -> None:
        """Drop what is kept about an ended request."""
