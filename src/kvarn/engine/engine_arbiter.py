"""Engines of one process take turns: one of them steps at a time, and each gets its share of the time.

    slot.enter() ──> the turn is free, or still held ──> step ──> slot.leave(): charged, and the next slot is called
         └── queues; the slot with the least time for its share goes first (start-time fair queueing)

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
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

from kvarn.config import BACKGROUND_SHARE
from kvarn.errors import RequestError
from kvarn.request import Clock

if TYPE_CHECKING:
    from kvarn.engine.engine import Engine

CLOSED = "this LLM is closed; make a new one"
LOOK_EVERY_S = 0.05  # a waiting engine gives a sign of life and looks whether it is still wanted
RETURN_WITHIN_S = 0.02  # an engine that keeps the turn between two steps loses it after this long


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine has to do."""

    num_requests: int = 1
    priority: int = 0  # the highest of its requests

    @property
    def weight(self) -> float:
        return 1.0 + math.log2(max(1, self.num_requests))


class EngineArbiter:
    """Which engine may step now, and which is next."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy: set[ArbiterSlot] = set()  # engines with work: in the turn, queued, or about to come back
        self._holder: ArbiterSlot | None = None
        self._left_at: float | None = None  # when the holder left to come back at once; None while it computes
        self._now = 0.0  # virtual time: of the last slot that entered
        self._arrivals = count()

    def slot(self) -> ArbiterSlot:
        """A slot for one more engine."""
        return ArbiterSlot(self)

    @property
    def is_contended(self) -> bool:
        """Whether several engines have work; may be out of date at once."""
        return len(self._busy) > 1

    def has_others(self, slot: ArbiterSlot) -> bool:
        """Whether engines beside this one have work; may be out of date at once."""
        return len(self._busy) > (slot in self._busy)

    def _join(self, slot: ArbiterSlot, demand: Demand) -> bool:
        """Take the turn if it is free; else queue."""
        with self._lock:
            slot.demand = demand
            if slot not in self._busy:
                self._busy.add(slot)
                slot.served = max(slot.served, self._now)  # idle time is not saved up
            slot.arrived = next(self._arrivals)
            slot.is_waiting = True
            self._call_next()
            return not slot.is_waiting

    def _look(self, slot: ArbiterSlot) -> bool:
        """Whether the slot has been called; one that kept the turn and stayed away has lost it."""
        with self._lock:
            self._call_next()
            return not slot.is_waiting

    def _leave(self, slot: ArbiterSlot, wants_more: bool) -> None:
        with self._lock:
            if self._holder is slot and self._left_at is None:
                slot.served += (self._clock() - slot.entered_at) / _weight(slot, self._busy)
                self._left_at = self._clock()
            slot.is_waiting = False
            if not wants_more:
                self._forget(slot)
            self._call_next()

    def _forfeit(self, slot: ArbiterSlot) -> None:
        """Let the others go on, whatever the slot is still computing."""
        with self._lock:
            self._forget(slot)
            self._call_next()

    def _forget(self, slot: ArbiterSlot) -> None:
        slot.is_waiting = False
        self._busy.discard(slot)
        if self._holder is slot:
            self._holder = None

    def _call_next(self) -> None:
        holder, away_since = self._holder, self._left_at
        if holder is not None and away_since is None:
            return  # it computes
        waiting = [slot for slot in self._busy if slot.is_waiting]
        if not waiting:
            return
        chosen = min(waiting, key=_order)
        if holder is not None and away_since is not None and not holder.is_waiting:
            is_late = self._clock() - away_since > RETURN_WITHIN_S
            if holder.served < chosen.served and not is_late:
                return  # the holder is next again: the turn is kept for it
        self._enter(chosen)

    def _enter(self, slot: ArbiterSlot) -> None:
        slot.is_waiting = False
        self._holder, self._left_at = slot, None
        self._now = max(self._now, slot.served)
        slot.entered_at = self._clock()
        slot.called.set()


class ArbiterSlot:
    """One engine of the arbiter; its own thread enters and leaves, others may only forfeit."""

    def __init__(self, arbiter: EngineArbiter) -> None:
        self._arbiter = arbiter
        # Written by the arbiter, under its lock:
        self.demand = Demand()
        self.served = 0.0  # virtual seconds: time it had, divided by its share
        self.entered_at = 0.0
        self.arrived = 0
        self.is_waiting = False
        self.called = threading.Event()

    def enter(self, demand: Callable[[], Demand], is_wanted: Callable[[], bool], on_wait: Callable[[], None]) -> bool:
        """Wait for the turn; False when is_wanted() ended first. on_wait() is called now and then meanwhile."""
        arbiter = self._arbiter
        self.called.clear()
        if arbiter._join(self, demand() if arbiter.has_others(self) else Demand()):
            return True
        while not self.called.wait(LOOK_EVERY_S):
            on_wait()
            if arbiter._look(self):
                break
            if not is_wanted():
                self.leave(wants_more=False)
                return False
        on_wait()
        return True

    def leave(self, *, wants_more: bool) -> None:
        """Pass the turn on; wants_more: this engine has another step to do."""
        self._arbiter._leave(self, wants_more)

    def forfeit(self) -> None:
        """Lose the turn in the middle of a step that does not end; from any thread."""
        self._arbiter._forfeit(self)


class Waiting(Protocol):
    """kvarn.engine.thread.EngineThread, as its turn needs it."""

    is_stopping: bool

    def beat(self) -> None: ...


class EngineTurn:
    """One engine's turn among the engines of the process; for the engine's thread, but for forfeit()."""

    def __init__(self, arbiter: EngineArbiter, engine: Engine, thread: Waiting) -> None:
        self._arbiter = arbiter
        self._slot = arbiter.slot()
        self._engine = engine
        self._thread = thread
        self._call_priority: int | None = None  # of the call between steps that holds the turn
        engine.offer_turn = partial(EngineTurn.offer, weakref.proxy(self))  # no cycle either

    def wait(self) -> bool:
        """Wait until this engine may compute; False when its thread was told to stop meanwhile."""
        return self._slot.enter(self._demand, lambda: not self._thread.is_stopping, self._thread.beat)

    def leave(self) -> None:
        """A step is done."""
        self._slot.leave(wants_more=self._engine.has_work and self._engine.wait_s <= 0)

    def forfeit(self) -> None:
        """Let the other engines go on although a step does not end; from any thread."""
        self._slot.forfeit()

    @contextmanager
    def held_for(self, priority: int) -> Iterator[None]:
        """The turn for a call between steps that computes."""
        self._call_priority = priority
        self._enter()
        try:
            yield
        finally:
            self._call_priority = None
            self._slot.leave(wants_more=self._engine.has_work)

    def offer(self) -> None:
        """Called by a long call between its computations: it is alive, and other engines may step."""
        self._thread.beat()
        if self._arbiter.is_contended:
            self._slot.leave(wants_more=True)
            self._enter()

    def _enter(self) -> None:
        if not self.wait():
            raise RequestError(CLOSED)

    def _demand(self) -> Demand:
        demand, own = self._engine.demand, self._call_priority
        if own is None:
            return demand
        return Demand(demand.num_requests + 1, max(demand.priority, own) if demand.num_requests else own)


def process_arbiter(device: str | None = None) -> EngineArbiter:
    """The arbiter all engines of this process on one device share; a forked child has its own."""
    return _arbiter_of(os.getpid(), device)


@cache
def _arbiter_of(_pid: int, _device: str | None) -> EngineArbiter:
    return EngineArbiter()


def _order(slot: ArbiterSlot) -> tuple[float, int]:
    return slot.served, slot.arrived


def _weight(slot: ArbiterSlot, busy: Collection[ArbiterSlot]) -> float:
    """The slot's share of the time, relative to the others that have work now."""
    own = slot.demand.weight
    if len(busy) < 2:
        return own
    top = max(other.demand.priority for other in busy)
    if slot.demand.priority == top:
        return own
    higher = sum(other.demand.weight for other in busy if other.demand.priority == top)
    lower = sum(other.demand.weight for other in busy if other.demand.priority < top)
    return own / lower * higher * BACKGROUND_SHARE / (1 - BACKGROUND_SHARE)
