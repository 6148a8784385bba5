"""The state machine of a request: every transition that exists, and none that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvarn.errors import BackendError, Cancelled
from kvarn.request import Finish, Request, RequestState
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import new_request

STOP = Finish(FinishReason.STOP)

MOVES: dict[str, Callable[[Request], None]] = {
    "start": Request.start,
    "finish": lambda request: request.finish(STOP),
    "fail": lambda request: request.fail(BackendError("broken")),
    "cancel": Request.cancel,
    "expire": Request.expire,
    "preempt": Request.preempt,
}
WAYS = {
    (): RequestState.WAITING,
    ("start",): RequestState.RUNNING,
    ("cancel",): RequestState.CANCELLED,
    ("fail",): RequestState.FAILED,
    ("finish",): RequestState.FINISHED,
    ("start", "finish"): RequestState.FINISHED,
    ("start", "fail"): RequestState.FAILED,
    ("start", "cancel"): RequestState.CANCELLED,
    ("expire",): RequestState.CANCELLED,
    ("start", "expire"): RequestState.CANCELLED,
    ("start", "preempt"): RequestState.WAITING,
    ("start", "preempt", "start"): RequestState.RUNNING,
    ("start", "preempt", "cancel"): RequestState.CANCELLED,
    ("start", "preempt", "finish"): RequestState.FINISHED,
    ("start", "preempt", "fail"): RequestState.FAILED,
    ("start", "preempt", "expire"): RequestState.CANCELLED,
}
NO_WAYS = [
    (moves, move)
    for moves in WAYS
    for move in MOVES
    if (*moves, move) not in WAYS and moves[:2] != ("start", "preempt")
]


def request_after(*moves: str) -> Request:
    request = new_request("r1", (1, 2), SamplingParams(deadline_s=9.0), max_total_tokens=10, seed=1)
    for move in moves:
        MOVES[move](request)
    return request


@pytest.mark.parametrize(("moves", "state"), WAYS.items(), ids=str)
def test_moves_lead_to_states(moves: tuple[str, ...], state: RequestState) -> None:
    assert request_after(*moves).state is state


@pytest.mark.parametrize(("moves", "move"), NO_WAYS, ids=str)
def test_moves_that_are_not_drawn_are_refused(moves: tuple[str, ...], move: str) -> None:
    request = request_after(*moves)
    with pytest.raises(AssertionError):
        MOVES[move](request)


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        (("start", "finish"), FinishReason.STOP),
        (("start", "fail"), FinishReason.FAILED),
        (("cancel",), FinishReason.CANCELLED),
        (("expire",), FinishReason.DEADLINE),
        (("start", "expire"), FinishReason.DEADLINE),
    ],
)
def test_every_end_has_one_reason(moves: tuple[str, ...], reason: FinishReason) -> None:
    request = request_after(*moves)
    assert request.is_ended
    assert request.completion("").finish_reason is reason


def test_a_cancelled_request_carries_its_error() -> None:
    assert isinstance(request_after("cancel").error, Cancelled)


def test_output_is_what_follows_the_prompt() -> None:
    request = request_after("start")
    request.append(7)
    request.append(8)
    assert (request.output_ids, request.num_output, request.token_ids) == ((7, 8), 2, [1, 2, 7, 8])


def test_a_preempted_request_keeps_its_tokens_and_its_first_start() -> None:
    request = request_after("start")
    request.num_computed = 2
    request.append(7)
    started_at = request.started_at
    request.preempt()
    assert (request.num_computed, request.num_preemptions, request.output_ids) == (0, 1, (7,))
    request.start(num_computed=1)
    assert (request.started_at, request.num_computed, request.num_cached) == (started_at, 1, 0)


def test_times_are_taken_from_the_clock_of_the_request() -> None:
    request = new_request("r1", (1,), SamplingParams(deadline_s=5.0), 10, 1, clock=lambda: 50.0)
    assert (request.submitted_at, request.deadline_at) == (50.0, 55.0)
