"""Steps that the device computes while the host plans the next one; read in the order of their launch.

A request in such a step is one token ahead of what the host knows: its next row takes that token on the device. Where
it turns out to have ended or been preempted meanwhile, what the row computed does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvarn.backends.batch import Sampled
from kvarn.decoding.decoder import Commit, Decoder, LaunchingDecoder, ReadCommits, Span
from kvarn.engine.launching.decode_rows import NO_PLAIN_TOKENS, DecodeRows, PlainTokens
from kvarn.engine.scheduling.plan import StepPlan, make_plan
from kvarn.request import Request, RequestState


class LaunchedRequest(NamedTuple):
    """One request's part of a step under way, and how often it had been preempted and late when that was launched."""

    span: Span
    num_preemptions: int
    num_late: int

    def leave(self) -> bool:
        """The step is over; whether the request still holds what it computed."""
        request = self.span.request
        request.num_under_way -= 1
        is_held = not self.is_void and request.num_preemptions == self.num_preemptions
        if is_held:
            request.num_launched -= len(self.span.token_ids)
        return is_held

    @property
    def is_void(self) -> bool:
        """The request has ended, or its row took a token that was not chosen in the end."""
        return self.span.request.is_ended or self.span.request.num_late != self.num_late


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """One step under way."""

    plan: StepPlan
    parts: tuple[LaunchedRequest, ...]
    read: ReadCommits


@dataclass(frozen=True, slots=True)
class LaunchedDecodes:
    """One of steady requests; parts are made for those to whom something has happened."""

    plan: StepPlan
    rows: DecodeRows
    sample: Callable[[], Sampled]
    decoder: LaunchingDecoder
    marks: list[tuple[int, int]]  # of each request: how often it had been preempted and late

    @property
    def parts(self) -> list[LaunchedRequest]:
        return self.parts_of(range(len(self.rows.requests)))

    def parts_of(self, rows: Sequence[int]) -> list[LaunchedRequest]:
        return [LaunchedRequest(span, *self.marks[i]) for i, span in zip(rows, self.rows.spans(rows), strict=True)]

    def touched(self) -> list[int]:
        """Those that have ended, been preempted or been late since the launch."""
        marks = zip(self.rows.requests, self.marks, strict=True)
        return [
            i
            for i, (request, mark) in enumerate(marks)
            if request.state is not RequestState.RUNNING or (request.num_preemptions, request.num_late) != mark
        ]

    def commits_of(self, rows: Sequence[int], sampled: Sampled) -> list[Commit]:
        """One for each row; of those that have ended, what was chosen does not matter."""
        spans = self.rows.spans(rows)
        alive = [(i, span) for i, span in zip(rows, spans, strict=True) if not span.request.is_ended]
        found = {commit.request.id: commit for commit in self.decoder.commits_of(alive, sampled)}
        return [found.get(span.request.id) or Commit(span.request, 1) for span in spans]


class LaunchedSteps:
    """The steps under way; none where the backend computes while it is waited for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = cast(LaunchingDecoder, decoder)  # where both it and its backend run ahead
        self._steps: deque[LaunchedStep | LaunchedDecodes] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan can be launched."""
        if not (self._decoder.runs_ahead and self._decoder.backend.runs_ahead):
            return False
        is_plain = plan.batch is not None and plan.layerwise is None and plan.batch.states is None
        return plan.decodes is not None or (is_plain and self._decoder.can_launch(plan.spans))

    def launch(self, plan: StepPlan) -> None:
        """Begin a step whose copies were made; when that fails, it is as if it had never been planned."""
        assert plan.batch is not None
        if plan.decodes is not None:
            self._launch_decodes(plan, cast(DecodeRows, plan.decodes))
            return
        read = self._decoder.launch(plan.spans, self._decoder.backend.forward(plan.batch))
        for span in plan.spans:
            span.request.num_under_way += 1
            span.request.num_launched += len(span.token_ids)
        parts = [LaunchedRequest(span, span.request.num_preemptions, span.request.num_late) for span in plan.spans]
        self._steps.append(LaunchedStep(plan, tuple(parts), read))

    def read(self) -> tuple[StepPlan, list[Commit], PlainTokens]:
        """Wait for the oldest step: its plan, the commits that count, and the tokens of the other requests.

        A preempted request has no blocks any more, but its token is the one it would have chosen without that.
        """
        step = self._steps[0]
        if isinstance(step, LaunchedDecodes):
            return self._read_decodes(step)
        commits = step.read()
        self._steps.popleft()
        return step.plan, _counting(step.parts, commits), NO_PLAIN_TOKENS

    def discard(self) -> list[StepPlan]:
        """Give up what is under way, because a device failed: what is to be computed again, the oldest first."""
        plans = []
        while self._steps:
            step = self._steps.popleft()
            entries = zip(step.plan.entries, step.parts, strict=True)
            plans.append(make_plan([entry for entry, part in entries if part.leave()]))
        return plans

    def _launch_decodes(self, plan: StepPlan, rows: DecodeRows) -> None:
        sample = self._decoder.launch_rows(rows.batch, rows.choices)
        marks = [(request.num_preemptions, request.num_late) for request in rows.requests]
        for index, request in enumerate(rows.requests):
            request.chosen_row = index
            request.num_under_way += 1
            request.num_launched += 1
        self._steps.append(LaunchedDecodes(plan, rows, sample, self._decoder, marks))

    def _read_decodes(self, step: LaunchedDecodes) -> tuple[StepPlan, list[Commit], PlainTokens]:
        sampled = step.sample()
        self._steps.popleft()
        touched = list(range(len(step.marks))) if sampled.late else step.touched()
        apart = set(touched)
        _leave([request for i, request in enumerate(step.rows.requests) if i not in apart])
        commits, plain = step.rows.outcome(sampled, self._decoder, touched)
        return step.plan, commits + _counting(step.parts_of(touched), step.commits_of(touched, sampled)), plain


def _leave(requests: Iterable[Request]) -> None:
    """A step is over to whose requests nothing has happened."""
    for request in requests:
        request.num_under_way -= 1
        request.num_launched -= 1


def _counting(parts: Sequence[LaunchedRequest], commits: Sequence[Commit]) -> list[Commit]:
    """The commits of a step that was just read, as far as they count."""
    found = []
    for part, commit in zip(parts, commits, strict=True):
        is_void, is_held = part.is_void, part.leave()
        if is_void:
            continue
        is_late = commit.is_late and commit.request.num_under_way > 0  # else no step took another token for it
        if is_late:
            commit.request.num_late += 1
            commit.request.num_launched = 0
        num_computed = commit.num_computed if is_held or commit.error is not None else 0
        is_same = is_late == commit.is_late and num_computed == commit.num_computed
        found.append(commit if is_same else commit._replace(is_late=is_late, num_computed=num_computed))
    return found


def with_known_tokens(plan: StepPlan) -> StepPlan:
    """A plan that was made one token ahead, once that token is known; requests that ended are left out."""
    entries = [
        entry._replace(span=_with_known_tokens(entry.span)) for entry in plan.entries if not entry.span.request.is_ended
    ]
    is_over = plan.layerwise is None or plan.layerwise.entry.span.request.is_ended
    return make_plan(entries, None if is_over else plan.layerwise)


def _with_known_tokens(span: Span) -> Span:
    token_ids = span.request.token_ids[span.start : span.end]
    assert len(token_ids) == len(span.token_ids), f"request {span.request.id} has no token at {span.end - 1}"
    return span._replace(token_ids=token_ids)
