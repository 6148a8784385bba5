"""The state machine of a request: every transition that exists, and none that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvarn.errors import BackendError, Cancelled
from kvarn.request import Finish, Request, RequestState
from kvarn.types import FinishReason, SamplingParams

STOP = Finish(FinishReason.STOP)

MOVES: dict[str, Callable[[Request], None]] = {
    "start": Request.start,
    "finish": lambda request: request.finish(STOP),
    "fail": lambda request: request.fail(BackendError("broken")),
    "cancel": Request.cancel,
}
WAYS = {
    (): RequestState.WAITING,
    ("start",): RequestState.RUNNING,
    ("cancel",): RequestState.CANCELLED,
    ("fail",): RequestState.FAILED,
    ("start", "finish"): RequestState.FINISHED,
    ("start", "fail"): RequestState.FAILED,
    ("start", "cancel"): RequestState.CANCELLED,
}
NO_WAYS = [(moves, move) for moves in WAYS for move in MOVES if (*moves, move) not in WAYS]


def request_after(*moves: str) -> Request:
    request = Request("r1", (1, 2), SamplingParams(), max_total_tokens=10, seed=1)
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
