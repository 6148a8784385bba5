"""The client's copies of an engine's requests, brought up to date after each step.

A reader in an event loop takes tokens from them as it would from the engine's own: the text is closed before the last
token is appended, and what a closed text still lacks comes with the last event (kvarn.engine.delivery).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvarn.engine.process.messages import AcceptedRequest, StepDone
from kvarn.engine.stream import Stream
from kvarn.engine.submission import Submission
from kvarn.errors import KvarnError
from kvarn.request import Request, RequestState
from kvarn.types import FinishReason, TokenEvent

_STATES = {
    FinishReason.FAILED: RequestState.FAILED,
    FinishReason.CANCELLED: RequestState.CANCELLED,
    FinishReason.DEADLINE: RequestState.CANCELLED,
}


class RequestCopies:
    """By the numbers of the engine's requests; for one thread, while others read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._live: dict[int, Request] = {}
        self._by_id: dict[str, Request] = {}

    def open(self, submission: Submission, told: Sequence[AcceptedRequest]) -> tuple[Request, ...]:
        """Copies of the answers to one submission."""
        admitted = submission.admitted
        assert admitted is not None
        requests = tuple(
            Request(
                one.id,
                admitted.prompt_ids,
                submission.params,
                admitted.max_total_tokens,
                one.seed,
                tenant=submission.tenant,
                choice=one.choice,
                number=one.number,
                is_streamed=submission.is_streamed,
                token_ids=list(admitted.prompt_ids),
                priority=submission.params.priority,
                submitted_at=one.submitted_at,
            )
            for one in told
        )
        for request in requests:
            self._stream.open(request, submission)
            self._live[request.number] = self._by_id[request.id] = request
        return requests

    def advance(self, step: StepDone) -> None:
        """Take what a step gave. Its ends are closed first: a reader must not take their last tokens."""
        for _, event in step.events:
            if event.finish_reason is not None and (ended := self._by_id.get(event.request_id)) is not None:
                ended.text.is_closed = True
        live = self._live
        for number, token_id in zip(step.numbers, step.token_ids, strict=True):
            if number in live:  # else it has failed meanwhile
                live[number].token_ids.append(token_id)
        for news in step.progress:
            if (request := live.get(news.number)) is None:
                continue
            request.started_at, request.num_cached = news.started_at, news.num_cached
            request.num_computed = news.num_computed
            request.first_token_at, request.num_first = news.first_token_at, news.num_first
            if news.started_at is not None:
                request.state = RequestState.RUNNING
        for _, event in step.events:
            if event.finish_reason is not None and (ended := self._by_id.get(event.request_id)) is not None:
                self._end(ended, event)

    def fail(self, requests: Iterable[Request], error: KvarnError) -> None:
        """Nothing more will come of these."""
        for request in requests:
            if not request.is_ended:
                request.text.is_closed = True
                request.error, request.finish_reason = error, FinishReason.FAILED
                request.state, request.ended_at = RequestState.FAILED, request.clock()
                self._forget(request)

    def _end(self, request: Request, event: TokenEvent) -> None:
        assert event.finish_reason is not None
        request.finish_reason = event.finish_reason
        request.state = _STATES.get(event.finish_reason, RequestState.FINISHED)
        request.stop_match = None if event.completion is None else event.completion.stop_match
        request.ended_at = request.clock()
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._live[request.number], self._by_id[request.id]
