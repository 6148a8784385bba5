"""How far a draft model guesses ahead: as many tokens as its own measured time leaves worth it, often none.

Other drafts are there for nothing; these take a pass of the draft model each, so their number is chosen before they are
made. Where they do not pay the model rests, and is tried again after a while. Knows seconds and rates, not the model.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol, cast

from kvarn.backends.protocol import Hidden
from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.draft_length import RowCosts
from kvarn.decoding.speculation.drafters import Proposal
from kvarn.request import Clock, Request

log = logging.getLogger("kvarn.engine")

SOURCE = "draft"
MAX_TENANTS = 1024
MAX_DEPTH = 8  # tokens for each request in one step
FIRST_PAUSE, MAX_PAUSE = 32, 1024  # steps after which a model that does not pay is tried again; doubled each time


class DraftLength(Protocol):
    """How many of the drafts of a step are computed; see kvarn.decoding.speculation.draft_length."""

    def observe(self, num_rows: int, seconds: float) -> None: ...

    def may_pay(self, num_decodes: int, most: int) -> bool: ...

    def spare_s(self, num_decodes: int) -> float: ...

    def num_rows(self, num_decodes: int, gains: Sequence[float], row_s: float = 0.0) -> int: ...


class DraftModel(Protocol):
    """A second model of the same vocabulary, or a layer of the model's own file, with a cache of its own."""

    reads_states: bool  # it is a StateReader

    def prepare(self, requests: Sequence[Request], seconds: float) -> list[Request]:
        """Read what it has not read of these, for about that long; the requests that it can guess for."""

    def draft(self, requests: Sequence[Request], depth: int) -> Mapping[str, Sequence[int]]:
        """Up to depth tokens that may follow each of these requests, which it is prepared for."""

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ones too."""

    def close(self) -> None: ...


class StateReader(DraftModel, Protocol):
    """Guesses from the states that the model itself computes."""

    def take_states(self, request: Request, start: int, states: Hidden) -> None:
        """Those of positions from start on, which are the request's for good."""


@dataclass(slots=True)
class Rest:
    """For how many more steps a tenant is not guessed for."""

    left: int = 0
    following: int = FIRST_PAUSE

    def is_over(self) -> bool:
        """Whether it is; else one more step of it has passed."""
        if self.left == 0:
            return True
        self.left -= 1
        return False

    def decide(self, *, does_pay: bool) -> None:
        if does_pay:
            self.following = FIRST_PAUSE
        else:
            self.left, self.following = self.following, min(2 * self.following, MAX_PAUSE)


class ModelDrafts:
    """Proposals of one draft model for the requests of an engine."""

    def __init__(self, model: DraftModel, clock: Clock = time.perf_counter) -> None:
        self.model = model
        self._clock = clock
        self._costs = RowCosts()  # of a pass, by its requests
        self._rests: OrderedDict[str, Rest] = OrderedDict()  # by tenant: what one is answered slows no other down
        self._has_failed = False
        self._spent_s = 0.0

    def take_spent_s(self) -> float:
        """Seconds since the last call: they are no part of what a step's rows take."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def proposals(
        self, rates: Mapping[Request, AcceptanceRates], num_decodes: int, max_rows: int, length: DraftLength
    ) -> Mapping[str, Proposal]:
        """Of each request that it guesses for now, by id."""
        if self._has_failed or not rates or max_rows < 1:
            return {}
        awake = {tenant for tenant in {one.tenant for one in rates} if self._rest_of(tenant).is_over()}
        rates = {one: found for one, found in rates.items() if one.tenant in awake}
        if not rates:
            return {}
        with self._spending():
            return self._proposals(rates, num_decodes, max_rows, length)
        return {}

    @property
    def reads_states(self) -> bool:
        """Whether take_states() wants those of all positions."""
        return self.model.reads_states and not self._has_failed

    def take_states(self, request: Request, start: int, states: Hidden) -> None:
        if self.reads_states:
            with self._spending():
                cast(StateReader, self.model).take_states(request, start, states)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count the time; what fails is not used any more, as a guess is no reason to fail."""
        started_at = self._clock()
        try:
            yield
        except Exception as error:
            log.warning("the draft model failed and is not used any more: %s", error or type(error).__name__)
            self._has_failed = True
        finally:
            self._spent_s += self._clock() - started_at

    def release(self, request_id: str) -> None:
        self.model.release(request_id)

    def _proposals(
        self, rates: Mapping[Request, AcceptanceRates], num_decodes: int, max_rows: int, length: DraftLength
    ) -> Mapping[str, Proposal]:
        ready = self.model.prepare(list(rates), length.spare_s(num_decodes))
        if not ready:
            return {}
        gains = sorted((gain for one in ready for gain in gains_of(rates[one])), reverse=True)
        depth = self._depth(ready, num_decodes, gains[:max_rows], length)
        started_at = self._clock()
        found = self.model.draft(ready, depth)
        self._costs.observe(len(ready), (self._clock() - started_at) / depth)
        return {name: Proposal(SOURCE, token_ids, 0) for name, token_ids in found.items()}

    def _depth(self, ready: Sequence[Request], num_decodes: int, gains: Sequence[float], length: DraftLength) -> int:
        """Passes for all that are ready; one, to be compared only, where it is not known or not believed to pay."""
        known = self._costs.seconds(len(ready), len(ready))
        if known is None:
            return 1
        num_rows = length.num_rows(num_decodes, gains, known[0] / len(ready))
        for tenant in {one.tenant for one in ready}:
            self._rest_of(tenant).decide(does_pay=num_rows > 0)
        return max(1, -(-num_rows // len(ready)))

    def _rest_of(self, tenant: str) -> Rest:
        rest = self._rests.setdefault(tenant, Rest())
        self._rests.move_to_end(tenant)
        if len(self._rests) > MAX_TENANTS:
            self._rests.popitem(last=False)
        return rest


def gains_of(rates: AcceptanceRates) -> list[float]:
    """The chance of each token of a guess to be reached and right."""
    return list(accumulate((rates.rate(SOURCE, offset) for offset in range(MAX_DEPTH)), mul))
