"""What the tests of a key's limits share: a clock that they set, callers, and refusals."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TypeVar

import pytest

from kvarn.errors import InvalidParameter, RateLimited
from kvarn.server.access.keys import Principal
from kvarn.server.access.limits import RateLimits
from kvarn.server.access.reservation import Reservation
from kvarn.server.access.tiers import Tier

T = TypeVar("T")


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def caller(name: str = "alice", **limits: int) -> Principal:
    return Principal(name, Tier("test", **limits), name)  # type: ignore[arg-type]


def at_once(call: Coroutine[object, object, T]) -> T:
    """The result of a call that waits for nothing, as those of one process do."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")


def reserve(limits: RateLimits, principal: Principal, num_tokens: int) -> Reservation:
    """What a call does: enter, then take what it may take; one that is refused gives its place back."""
    reservation = at_once(limits.enter(principal))
    try:
        at_once(reservation.grow(num_tokens))
    except (RateLimited, InvalidParameter):
        reservation.withdraw()
        raise
    return reservation


def refusal(limits: RateLimits, principal: Principal, num_tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        reserve(limits, principal, num_tokens)
    return caught.value
