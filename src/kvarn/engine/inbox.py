"""Calls for the engine's thread, and their refusal when it will run no more of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kvarn.engine.engine import Engine
from kvarn.engine.handle import settle
from kvarn.errors import CapacityError, KvarnError

T = TypeVar("T")
DRAIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[T]):
    """A function to run on the engine's thread, and where its result goes."""

    function: Callable[[Engine], T]
    result: Future[T]
    due_at: float | None = None  # set for calls that compute: one of them runs between two steps, the earliest first


class Inbox(SimpleQueue["EngineCall[Any] | None"]):
    """All calls in order of arrival, and those that compute in a heap of their own. None: only a reason to wake up.

    Each method is safe on any thread and never waits for a lock: a SimpleQueue may be used by finalisers and signal
    handlers, and a call is added to the heap, or taken from it, in one step of the interpreter.
    """

    def __init__(self) -> None:
        self._computing: list[tuple[float, int, EngineCall[Any]]] = []
        self._numbers = itertools.count()

    @property
    def has_computing(self) -> bool:
        return bool(self._computing)

    def defer(self, call: EngineCall[Any], due_at: float) -> None:
        """Keep a call that computes until its turn."""
        heappush(self._computing, (due_at, next(self._numbers), call))

    def next_computing(self) -> EngineCall[Any] | None:
        """The earliest deferred call whose caller still wants it."""
        while self._computing:
            try:
                _, _, call = heappop(self._computing)
            except IndexError:  # another thread refused it meanwhile
                return None
            if not call.result.cancelled():
                return call
        return None

    def refuse_all(self, failure: KvarnError) -> None:
        """Empty the inbox; every caller gets the failure."""
        while self.qsize():
            try:
                call = self.get_nowait()
            except Empty:
                break
            if call is not None:
                settle(call.result, error=fresh(failure))
        while (call := self.next_computing()) is not None:
            settle(call.result, error=fresh(failure))


def refuse_while_draining(is_draining: bool) -> None:
    """Raise for a submission that comes when nothing more is accepted."""
    if is_draining:
        raise CapacityError("the engine is shutting down; ask another one", retry_after_s=DRAIN_RETRY_S)


def fresh(error: KvarnError) -> KvarnError:
    """A copy for one more caller: an exception object collects the traceback of everyone who raises it."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
