"""How hidden states become tokens: what every way of generating answers to the scheduler.

Each step a request names a *span* of positions to compute; afterwards it reports what it *committed*. Prefill
chunk: span n, commits 0. Autoregressive: span 1, commits 1. Speculation: span 1 + k, commits 1 .. k + 1. Diffusion:
span = a block or the whole canvas, commits a block's tokens at its end. span() and commit() compute; the other methods
tell the scheduler what a request needs, so that it never asks which kind of model it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvarn.backends.batch import Batch, Feedback, Sampled, SampleRows
from kvarn.backends.protocol import Backend, Hidden
from kvarn.backends.unused_ids import UnusedIds
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.diffusion import CanvasView
from kvarn.errors import AnswerError, KvarnError
from kvarn.request import Finish, Request
from kvarn.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Keys and values to pack into another sequence while the span is computed; see kvarn.backends.batch.Keep."""

    sequence: str
    num_slots: int  # of that sequence: the kept ones, and room for the block
    block_start: int
    block_end: int
    num_kept: int
    per_head: bool
    pool_kernel: int


@dataclass(frozen=True, slots=True)
class CanvasPart:
    """Positions from start on are a canvas of random tokens; see kvarn.backends.batch.Canvases."""

    start: int
    feedback: Feedback | None


@dataclass(frozen=True, slots=True)
class Reach:
    """What a span reads and writes beyond its own positions.

    slots    0 ......... start - shift ...... end - shift ...... num_slots
             | read      | written, read      | read             |
    """

    sequence: str  # of the KV cache; a request may have several
    num_slots: int  # of that sequence, all of them read
    slot_shift: int = 0
    keep: KeptPart | None = None
    canvas: CanvasPart | None = None
    companion: Span | None = None  # the same positions in another context; its outputs come right after this span's


class Span(NamedTuple):  # as what follows: a tuple is made in a fifth of the time of a frozen dataclass
    """Positions start .. start + len(token_ids) of one request; outputs are offsets whose hidden state is wanted."""

    request: Request
    start: int
    token_ids: Sequence[int]
    outputs: tuple[int, ...]
    reach: Reach | None = None  # None: the span ends the request's only sequence
    num_drafts: int = 0  # of the tokens: the last ones, guessed and not chosen yet

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_slots(self) -> int:
        """Slots of its sequence after this step."""
        return self.end if self.reach is None else self.reach.num_slots

    @property
    def num_rows(self) -> int:
        """Rows of a batch, the companion's included."""
        companion = None if self.reach is None else self.reach.companion
        return len(self.token_ids) + (0 if companion is None else len(companion.token_ids))

    def needs(self) -> Iterator[tuple[str, int]]:
        """The sequences of the KV cache this span uses, and how many slots each must have."""
        if self.reach is None:
            yield self.request.id, self.end
            return
        yield self.reach.sequence, self.reach.num_slots
        if self.reach.keep is not None:
            yield self.reach.keep.sequence, self.reach.keep.num_slots
        if self.reach.companion is not None:
            yield from self.reach.companion.needs()


class CommittedToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None
    ends_answer: bool = False  # a constraint is satisfied, and nothing may follow


class Commit(NamedTuple):
    """What a step gave one request: num_computed positions now in the cache, and tokens of the answer."""

    request: Request
    num_computed: int
    tokens: tuple[CommittedToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens after the computed ones, if wanted
    error: KvarnError | None = None
    is_late: bool = False  # a step under way has taken another token for this one: what it gives does not count
    canvas: CanvasView | None = None  # the answer as it is now, for requests with diffusion.events
    num_rejected: int = 0  # positions after the computed ones whose tokens were guessed wrong: they are rolled back
    # Set by engine.stream, which reads the tokens as text:
    texts: tuple[str, ...] = ()  # texts[i] became certain with tokens[i]
    finish: Finish | None = None  # the last token ends the answer


ReadCommits = Callable[[], list[Commit]]


def failed_commit(request: Request, what: str, cause: BaseException) -> Commit:
    """The end of the one request whose own tokens, text or constraint failed; Ctrl-C is raised again.

    Called with whatever was raised: a panic of a library in Rust is no Exception.
    """
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        raise cause
    failure = AnswerError(f"{what}: {str(cause)[:200] or type(cause).__name__}; ask again, or another model")
    failure.__cause__ = cause
    return Commit(request, 0, error=failure)


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """The longest answer to a prompt, and the slots of each of its sequences in the KV cache then."""

    max_tokens: int
    sequence_lengths: tuple[int, ...]


class Decoder(Protocol):
    """One generation method: autoregressive, diffusion."""

    backend: Backend  # that samples the tokens
    unused: UnusedIds  # that are never chosen, and that no caller may name
    backend_s: float  # seconds that commit() has spent in the backend, ever
    speculation: Speculation | None  # drafts for its requests; None: off
    num_denoise_steps: int  # passes that filled positions of a diffusion model's answers, ever
    has_divisible_spans: bool  # a span may be cut down to one row; False: it is computed whole or not at all
    runs_ahead: bool  # it is a LaunchingDecoder
    can_fork: bool  # several answers may start on one computed prompt

    def bound(self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> AnswerBounds:
        """Refuse by name what this way of generating cannot honour; bound what it computes. Safe on any thread."""

    def slots_to_start(self, request: Request) -> tuple[int, ...]:
        """Slots of each sequence of the KV cache that the request needs to start running."""

    def slots_to_continue(self, request: Request) -> tuple[int, ...]:
        """The same for the next step of a running request."""

    def least_rows(self, request: Request) -> int:
        """Rows of the shortest next span."""

    def span(self, request: Request, budget: int) -> Span | None:
        """The positions to compute next, at most budget of them; None: nothing that fits."""

    def commit(self, spans: Sequence[Span], hidden: Hidden) -> list[Commit]:
        """Sample tokens; hidden holds the output rows of all spans in order. One Commit per span, same order."""

    def restart(self, request: Request) -> None:
        """The request was preempted and lost its blocks: continue from its tokens alone, with the same result."""

    def forget(self, request: Request) -> None:
        """Drop the state of a finished request."""


class LaunchingDecoder(Decoder, Protocol):
    """Names the next span of a request before its last token is known; see kvarn.engine.launching.launched_steps."""

    def can_launch(self, spans: Sequence[Span]) -> bool:
        """Whether launch() can take these: all that the host wants of them are the tokens they choose."""

    def is_steady(self, request: Request) -> bool:
        """Whether all its next choices depend on is their position: then steady_rows() can take it."""

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Tokens that may end it."""

    def steady_rows(self, requests: Sequence[Request]) -> SampleRows:
        """What their choices depend on at any position, one row for each."""

    def launch_rows(self, batch: Batch, rows: SampleRows) -> Callable[[], Sampled]:
        """Begin a step of steady requests; the result waits for it."""

    def compute_rows(self, batch: Batch, rows: SampleRows) -> Sampled:
        """The same where the backend does not run ahead."""

    def commits_of(self, rows: Sequence[tuple[int, Span]], sampled: Sampled) -> list[Commit]:
        """What launch_rows() gave some of its rows, each with its span."""

    def launch(self, spans: Sequence[Span], hidden: Hidden) -> ReadCommits:
        """commit() in two halves: begin to sample; call the result for the commits, which waits for the device."""
