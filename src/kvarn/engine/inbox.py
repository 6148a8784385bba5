"""What callers ask of the engine's thread, and their refusal when nobody will answer any more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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

    def run(self, engine: Engine) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            settle(self.answer, result=self.work(engine))
        except BaseException as error:  # the caller's to handle
            settle(self.answer, error=error)


Inbox = SimpleQueue[Asked[Any] | None]  # None: only a reason to wake up


def refuse_all(inbox: Inbox, failure: KvarnError) -> None:
    """Empty the inbox, telling everybody why."""
    while True:
        try:
            asked = inbox.get_nowait()
        except Empty:
            return
        if asked is not None:
            settle(asked.answer, error=fresh(failure))


def fresh(error: KvarnError) -> KvarnError:
    """A copy for one more caller: an exception object collects the traceback of everybody who raises it."""
    return type(error)(*error.args)
