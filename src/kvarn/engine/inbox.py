"""What callers ask of the engine's thread, and their refusal when nobody will answer any more."""

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
from kvarn.errors import KvarnError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """One piece of work for the engine's thread."""

    work: Callable[[Engine], T]
    answer: Future[T]
    due_at: float | None = None  # of work that computes: one piece is done between two steps, the earliest first

    def run(self, engine: Engine) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            settle(self.answer, result=self.work(engine))
        except BaseException as error:  # the caller's to handle
            settle(self.answer, error=error)


class Inbox:
    """Everything asked, as it came, and the pieces of work put aside from it.

    Each method is safe on any thread and never waits for a lock: a SimpleQueue may be used by finalisers and signal
    handlers, and a piece of work is added to the heap, or taken from it, in one step of the interpreter.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Asked[Any] | None] = SimpleQueue()
        self._works: list[tuple[float, int, Asked[Any]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._asked.qsize()

    @property
    def has_works(self) -> bool:
        return bool(self._works)

    def put(self, asked: Asked[Any] | None) -> None:
        """None: only a reason to wake up."""
        self._asked.put(asked)

    def get(self, timeout_s: float | None = None) -> Asked[Any] | None:
        """The next one as they came; raises queue.Empty when none came in time."""
        return self._asked.get(timeout=timeout_s)

    def put_aside(self, asked: Asked[Any], due_at: float) -> None:
        heappush(self._works, (due_at, next(self._numbers), asked))

    def next_work(self) -> Asked[Any] | None:
        """The earliest of those put aside, whose caller still wants it."""
        while self._works:
            try:
                _, _, asked = heappop(self._works)
            except IndexError:  # another thread refused it meanwhile
                return None
            if not asked.answer.cancelled():
                return asked
        return None

    def refuse_all(self, failure: KvarnError) -> None:
        """Empty the inbox, telling everybody why."""
        while len(self):
            try:
                asked = self._asked.get_nowait()
            except Empty:
                break
            if asked is not None:
                settle(asked.answer, error=fresh(failure))
        while (work := self.next_work()) is not None:
            settle(work.answer, error=fresh(failure))


def fresh(error: KvarnError) -> KvarnError:
    """A copy for one more caller: an exception object collects the traceback of everybody who raises it."""
    return type(error)(*error.args)
