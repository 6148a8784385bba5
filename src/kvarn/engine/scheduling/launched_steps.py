"""Steps that the device computes while the host plans the next one; read in the order of their launch.

A request in such a step is one token ahead of what the host knows: its next row takes that token on the device. Where
it turns out to have ended or been preempted meanwhile, what the row computed does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvarn.decoding.decoder import Commit, Decoder, LaunchingDecoder, ReadCommits, Span
from kvarn.engine.scheduling.plan import StepPlan, make_plan


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


class LaunchedSteps:
    """The steps under way; none where the backend computes while it is waited for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = cast(LaunchingDecoder, decoder)  # where both it and its backend run ahead
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan can be launched."""
        runs_ahead = self._decoder.runs_ahead and self._decoder.backend.runs_ahead
        is_plain = plan.batch is not None and plan.layerwise is None
        return runs_ahead and is_plain and self._decoder.can_launch(plan.spans)

    def launch(self, plan: StepPlan) -> None:
        """Begin a step whose copies were made; when that fails, it is as if it had never been planned."""
        assert plan.batch is not None
        hidden = self._decoder.backend.forward(plan.batch)
        read = self._decoder.launch(plan.spans, hidden)
        for span in plan.spans:
            span.request.num_under_way += 1
            span.request.num_launched += len(span.token_ids)
        parts = [LaunchedRequest(span, span.request.num_preemptions, span.request.num_late) for span in plan.spans]
        self._steps.append(LaunchedStep(plan, tuple(parts), read))

    def read(self) -> tuple[StepPlan, list[Commit]]:
        """Wait for the oldest step: its plan, and the commits that count.

        A preempted request has no blocks any more, but its token is the one it would have chosen without that.
        """
        step = self._steps[0]
        commits = step.read()
        self._steps.popleft()
        found = []
        for part, commit in zip(step.parts, commits, strict=True):
            is_void, is_held = part.is_void, part.leave()
            if is_void:
                continue
            if commit.is_late and commit.request.num_under_way:
                commit.request.num_late += 1
                commit.request.num_launched = 0
            found.append(commit if is_held or commit.error is not None else commit._replace(num_computed=0))
        return step.plan, found

    def discard(self) -> list[StepPlan]:
        """Give up what is under way, because a device failed: what is to be computed again, the oldest first."""
        plans = []
        while self._steps:
            step = self._steps.popleft()
            entries = zip(step.plan.entries, step.parts, strict=True)
            plans.append(make_plan([entry for entry, part in entries if part.leave()]))
        return plans


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
