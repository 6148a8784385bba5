"""How much may enter now: requests and tokens over a moving window, and the length of the queue.

A refusal says when to try again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from kvarn.config import EngineConfig
from kvarn.errors import CapacityError, InvalidParameter
from kvarn.request import Clock, Request

MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
MIN_EXPECTED = 512  # tokens: longer than most answers of a chat
EXPECTED_DECAY = 0.25  # of the distance to a shorter answer


class ExpectedAnswer:
    """How long an answer without max_tokens will be, going by the last ones: what is reserved for it.

    Rises at once to a longer answer and falls slowly after shorter ones, so that few exceed it. The context, or the
    whole window of a limit, would be a safe bound, and would refuse everybody else meanwhile.
    """

    __slots__ = ("_num_tokens",)

    def __init__(self) -> None:
        self._num_tokens = float(MIN_EXPECTED)

    def within(self, longest: int) -> int:
        """The tokens to reserve for an answer that cannot get longer than this."""
        return min(longest, round(self._num_tokens))

    def observe(self, num_tokens: float) -> None:
        """An answer without max_tokens has ended."""
        fallen = self._num_tokens + EXPECTED_DECAY * (num_tokens - self._num_tokens)
        self._num_tokens = max(num_tokens, fallen, MIN_EXPECTED)


@dataclass(slots=True)
class Charge:
    """What one request took from the window, when."""

    at: float
    amount: float


class MovingWindow:
    """At most rate_per_s x window_s within any window_s seconds."""

    def __init__(self, rate_per_s: float, window_s: float) -> None:
        self.capacity = rate_per_s * window_s
        self.window_s = window_s
        self._charges: deque[Charge] = deque()
        self._total = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until amount fits; 0.0: now. More than the capacity never fits and must not be asked for."""
        self._expire(now)
        excess = self._total + amount - self.capacity
        for charge in self._charges:
            if excess <= 1e-9:
                break
            excess -= charge.amount
            if excess <= 1e-9:
                return max(0.0, charge.at + self.window_s - now)
        return 0.0

    def charge(self, amount: float, now: float) -> Charge:
        charge = Charge(now, amount)
        self._charges.append(charge)
        self._total += amount
        return charge

    def refund(self, charge: Charge, amount: float) -> None:
        """Give back what was not used, unless it has left the window already."""
        if self._charges and charge.at >= self._charges[0].at and charge.amount >= amount:
            charge.amount -= amount
            self._total -= amount

    def _expire(self, now: float) -> None:
        while self._charges and self._charges[0].at <= now - self.window_s:
            self._total -= self._charges.popleft().amount
        if not self._charges:
            self._total = 0.0  # no rounding error lives longer than the window


class RateLimiter:
    """The three limits of a configuration."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self._clock = clock
        self._queue_limit = config.queue_limit
        self._requests = _window(config.requests_per_s, config.window_s)
        self._tokens = _window(config.tokens_per_s, config.window_s)
        self._expected_answer = ExpectedAnswer()
        self._num_returnable = 0.0  # tokens reserved for answers that have not ended
        self._ended_at: deque[float] = deque(maxlen=16)

    def admit(self, request: Request, num_waiting: int, num_beside: Callable[[int], int]) -> None:
        """Charge a request, or refuse it and all its choices with the time to try again.

        num_beside(priority) counts the waiting requests that such a request queues behind: lower priorities do not
        fill the queue of higher ones.
        """
        now = self._clock()
        num_answers = request.params.n if request.fork_of is None else 1
        num_left = self._queue_limit - num_answers
        if num_waiting > num_left and (num_waiting := num_beside(request.priority)) > num_left:
            raise CapacityError(
                f"{num_waiting:,} requests wait already, the queue holds {self._queue_limit:,}; try again later",
                retry_after_s=self._queue_retry_s(),
            )
        own, others = self._tokens_of(request), (num_answers - 1) * self._answer_tokens(request)
        if self._tokens is not None:
            _require(self._tokens, own + others, now, "tokens", self._retry_s)
        if self._requests is not None and request.fork_of is None:
            _require(self._requests, 1, now, "requests", self._requests.wait_s)
            self._requests.charge(1, now)
        if self._tokens is not None:
            request.charge = self._tokens.charge(own, now)
            self._num_returnable += _answer_share(request, request.charge)

    def settle(self, request: Request) -> None:
        """A request ended: the tokens it did not take are free again, and those it took beyond its share count."""
        now = self._clock()
        self._ended_at.append(now)
        if request.params.max_tokens is None and request.num_output:
            self._expected_answer.observe(request.num_output)
        charge: Charge | None = request.charge
        if charge is None or self._tokens is None:
            return
        self._num_returnable -= _answer_share(request, charge)
        unused = charge.amount - request.num_output - _own_prompt(request)
        if unused < 0:
            self._tokens.charge(-unused, now)
        else:
            self._tokens.refund(charge, unused)

    def _tokens_of(self, request: Request) -> float:
        """Tokens to reserve for a request; an answer without a limit takes no more than there is."""
        num_tokens = self._answer_tokens(request) + _own_prompt(request)
        if self._tokens is not None and request.params.max_tokens is None:
            return min(num_tokens, self._tokens.capacity)
        return num_tokens

    def _answer_tokens(self, request: Request) -> int:
        """Tokens of one answer: all it may take or, without max_tokens, as many as are to be expected."""
        longest = request.max_total_tokens - request.num_prompt
        return longest if request.params.max_tokens is not None else self._expected_answer.within(longest)

    def _retry_s(self, amount: float, now: float) -> float:
        """When so many tokens may be free; sooner than they leave the window, if answers may give them back."""
        assert self._tokens is not None
        wait_s = self._tokens.wait_s(amount, now)
        is_returned = self._tokens.wait_s(max(0.0, amount - self._num_returnable), now) == 0
        return min(wait_s, self._queue_retry_s()) if is_returned else wait_s

    def _queue_retry_s(self) -> float:
        """The usual time between two requests that ended; the median, because there may have been idle hours."""
        if len(self._ended_at) < 2:
            return 1.0
        usual_s = statistics.median(later - earlier for earlier, later in pairwise(self._ended_at))
        return min(max(usual_s, MIN_RETRY_S), MAX_RETRY_S)


def _window(rate_per_s: float | None, window_s: float) -> MovingWindow | None:
    """None: no limit. A window is long enough for at least one request or token."""
    return None if rate_per_s is None else MovingWindow(rate_per_s, max(window_s, 1 / rate_per_s))


def _own_prompt(request: Request) -> int:
    """Forks share the prompt of the first answer."""
    return request.num_prompt if request.fork_of is None else 0


def _answer_share(request: Request, charge: Charge) -> float:
    return max(0.0, charge.amount - _own_prompt(request))


def _require(
    window: MovingWindow, amount: float, now: float, what: str, retry_s: Callable[[float, float], float]
) -> None:
    if amount > window.capacity + 1e-9:
        raise InvalidParameter(
            f"the request may take {amount:,.0f} {what}, {window.capacity:,.0f} are allowed within "
            f"{window.window_s:g} s; shorten it or lower max_tokens or n",
            field="max_tokens",
        )
    if window.wait_s(amount, now) > 0:
        wait_s = retry_s(amount, now)
        raise CapacityError(
            f"{amount:,.0f} more {what} would exceed the {window.capacity:,.0f} allowed within {window.window_s:g} s; "
            f"try again in {wait_s:.2f} s",
            retry_after_s=wait_s,
        )
