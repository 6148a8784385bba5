"""How far a draft model guesses ahead: as many tokens as its own measured time leaves worth it, often none.

Other drafts are there for nothing; these take a pass of the draft model each, so their number is chosen before they are
made. Where they do not pay the model rests, and is tried again after a while. Knows seconds and rates, not the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.draft_length import RowCosts
from kvarn.decoding.speculation.drafters import Proposal
from kvarn.request import Clock, Request

log = logging.getLogger("kvarn.engine")

SOURCE = "draft"
MAX_DEPTH = 8  # tokens for each request in one step
FIRST_PAUSE, MAX_PAUSE = 32, 1024  # steps after which a model that does not pay is tried again; doubled each time


class DraftLength(Protocol):
    """How many of the drafts of a step are computed; see kvarn.decoding.speculation.draft_length."""

    def observe(self, num_rows: int, seconds: float) -> None: ...

    def may_pay(self, num_decodes: int, most: int) -> bool: ...

    def spare_s(self, num_decodes: int) -> float: ...

    def num_rows(self, num_decodes: int, gains: Sequence[float], row_s: float = 0.0) -> int: ...


class DraftModel(Protocol):
    """A second model of the same vocabulary, with a cache of its own."""

    def prepare(self, requests: Sequence[Request], seconds: float) -> list[Request]:
        """Read what it has not read of these, for about that long; the requests that it can guess for."""

    def draft(self, requests: Sequence[Request], depth: int) -> Mapping[str, Sequence[int]]:
        """Up to depth tokens that may follow each of these requests, which it is prepared for."""

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ones too."""

    def close(self) -> None: ...


class ModelDrafts:
    """Proposals of one draft model for the requests of an engine."""

    def __init__(self, model: DraftModel, clock: Clock = time.perf_counter) -> None:
        self.model = model
        self._clock = clock
        self._costs = RowCosts()  # of a pass, by its requests
        self._pause, self._next_pause = 0, FIRST_PAUSE
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
        if self._pause > 0:
            self._pause -= 1
            return {}
        started_at = self._clock()
        try:
            return self._proposals(rates, num_decodes, max_rows, length)
        except Exception as error:  # a guess is no reason to fail
            log.warning("the draft model failed and is not used any more: %s", error or type(error).__name__)
            self._has_failed = True
            return {}
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
        depth = self._depth(len(ready), num_decodes, gains[:max_rows], length)
        started_at = self._clock()
        found = self.model.draft(ready, depth)
        self._costs.observe(len(ready), (self._clock() - started_at) / depth)
        return {name: Proposal(SOURCE, token_ids, 0) for name, token_ids in found.items()}

    def _depth(self, num_ready: int, num_decodes: int, gains: Sequence[float], length: DraftLength) -> int:
        """Passes for all that are ready; one, to be compared only, where it is not known or not believed to pay."""
        known = self._costs.seconds(num_ready, num_ready)
        if known is None:
            return 1
        num_rows = length.num_rows(num_decodes, gains, known[0] / num_ready)
        if num_rows == 0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, MAX_PAUSE)
            return 1
        self._next_pause = FIRST_PAUSE
        return -(-num_rows // num_ready)


def gains_of(rates: AcceptanceRates) -> list[float]:
    """The chance of each token of a guess to be reached and right."""
    return list(accumulate((rates.rate(SOURCE, offset) for offset in range(MAX_DEPTH)), mul))
