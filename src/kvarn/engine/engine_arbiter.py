"""Engines of one process take turns: one of them steps at a time, and each gets its share of the time.

    lane.enter() ──> the turn is free, or mine still ──> step ──> lane.leave(): charged, and the next one is called
         └── waits in line; who has had the least time for its share goes first (start-time fair queueing)

A share grows with the logarithm of an engine's requests: a batch makes each of them cheaper, and one request for a
small model must not wait for sixty-four others. Engines whose requests all have a lower priority than another engine's
get BACKGROUND_SHARE of the time together. Knows times and counts; knows no model. An engine that is alone pays for two
uncontended locks.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from itertools import count

from kvarn.request import Clock

BACKGROUND_SHARE = 0.125  # as within an engine, see EngineConfig.background_share
LOOK_EVERY_S = 0.05  # somebody who waits says so and looks whether it is still wanted
RETURN_WITHIN_S = 0.02  # who keeps the turn between two steps loses it when it does not come back by then


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine has to do."""

    num_requests: int = 1
    priority: int = 0  # the highest of its requests

    @property
    def weight(self) -> float:
        return 1.0 + math.log2(max(1, self.num_requests))


class EngineArbiter:
    """Who may step now, and who is next."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy: set[ArbiterSlot] = set()  # engines with work: in the turn, in line, or about to come back
        self._holder: ArbiterSlot | None = None
        self._left_at: float | None = None  # when the holder went out to come back at once; None while it is inside
        self._now = 0.0  # virtual time: of the last who entered
        self._arrivals = count()

    def lane(self) -> ArbiterSlot:
        """A place for one more engine."""
        return ArbiterSlot(self)

    @property
    def is_contended(self) -> bool:
        """Whether several engines have work; may be out of date at once."""
        return len(self._busy) > 1

    def has_others(self, lane: ArbiterSlot) -> bool:
        """Whether engines beside this one have work; may be out of date at once."""
        return len(self._busy) > (lane in self._busy)

    def _join(self, lane: ArbiterSlot, demand: Demand) -> bool:
        """Take the turn if it is free; else stand in line."""
        with self._lock:
            lane.demand = demand
            if lane not in self._busy:
                self._busy.add(lane)
                lane.served = max(lane.served, self._now)  # nobody saves up time by being idle
            lane.arrived = next(self._arrivals)
            lane.is_waiting = True
            self._call_next()
            return not lane.is_waiting

    def _look(self, lane: ArbiterSlot) -> bool:
        """Whether the lane has been called; one that kept the turn and stayed away has lost it."""
        with self._lock:
            self._call_next()
            return not lane.is_waiting

    def _leave(self, lane: ArbiterSlot, wants_more: bool) -> None:
        with self._lock:
            if self._holder is lane and self._left_at is None:
                lane.served += (self._clock() - lane.entered_at) / _weight(lane, self._busy)
                self._left_at = self._clock()
            lane.is_waiting = False
            if not wants_more:
                self._forget(lane)
            self._call_next()

    def _forfeit(self, lane: ArbiterSlot) -> None:
        """Let the others go on; what the lane is doing counts as outside."""
        with self._lock:
            self._forget(lane)
            self._call_next()

    def _forget(self, lane: ArbiterSlot) -> None:
        lane.is_waiting = False
        self._busy.discard(lane)
        if self._holder is lane:
            self._holder = None

    def _call_next(self) -> None:
        holder, away_since = self._holder, self._left_at
        if holder is not None and away_since is None:
            return  # inside
        waiting = [lane for lane in self._busy if lane.is_waiting]
        if not waiting:
            return
        chosen = min(waiting, key=_order)
        if holder is not None and away_since is not None and not holder.is_waiting:
            is_late = self._clock() - away_since > RETURN_WITHIN_S
            if holder.served < chosen.served and not is_late:
                return  # it is the holder's turn again: kept for it
        self._enter(chosen)

    def _enter(self, lane: ArbiterSlot) -> None:
        lane.is_waiting = False
        self._holder, self._left_at = lane, None
        self._now = max(self._now, lane.served)
        lane.entered_at = self._clock()
        lane.called.set()


class ArbiterSlot:
    """One engine at the turnstile; its own thread enters and leaves, others may only forfeit."""

    def __init__(self, turnstile: EngineArbiter) -> None:
        self._turnstile = turnstile
        # Of the turnstile, under its lock:
        self.demand = Demand()
        self.served = 0.0  # virtual seconds: time it had, divided by its share
        self.entered_at = 0.0
        self.arrived = 0
        self.is_waiting = False
        self.called = threading.Event()

    def enter(self, demand: Callable[[], Demand], is_wanted: Callable[[], bool], on_wait: Callable[[], None]) -> bool:
        """Wait for the turn; False when is_wanted() ended first. on_wait() is called now and then meanwhile."""
        turnstile = self._turnstile
        self.called.clear()
        if turnstile._join(self, demand() if turnstile.has_others(self) else Demand()):
            return True
        while not self.called.wait(LOOK_EVERY_S):
            on_wait()
            if turnstile._look(self):
                break
            if not is_wanted():
                self.leave(wants_more=False)
                return False
        on_wait()
        return True

    def leave(self, *, wants_more: bool) -> None:
        """Pass the turn on; wants_more: this engine has another step to do."""
        self._turnstile._leave(self, wants_more)

    def forfeit(self) -> None:
        """Lose the turn in the middle of a step that does not end; from any thread."""
        self._turnstile._forfeit(self)


def process_turnstile() -> EngineArbiter:
    """The turnstile all engines of this process share; a forked child has its own."""
    return _turnstile_of(os.getpid())


@cache
def _turnstile_of(_: int) -> EngineArbiter:
    return EngineArbiter()


def _order(lane: ArbiterSlot) -> tuple[float, int]:
    return lane.served, lane.arrived


def _weight(lane: ArbiterSlot, busy: Collection[ArbiterSlot]) -> float:
    """The lane's share of the time, relative to the others that have work now."""
    own = lane.demand.weight
    if len(busy) < 2:
        return own
    top = max(other.demand.priority for other in busy)
    if lane.demand.priority == top:
        return own
    higher = sum(other.demand.weight for other in busy if other.demand.priority == top)
    lower = sum(other.demand.weight for other in busy if other.demand.priority < top)
    return own / lower * higher * BACKGROUND_SHARE / (1 - BACKGROUND_SHARE)
