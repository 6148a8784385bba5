"""Work ends with its caller: who starts it in a thread says until when it is wanted, long loops ask in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from kvarn.errors import Cancelled

T = TypeVar("T")
_ended: ContextVar[threading.Event | None] = ContextVar("kvarn_ended", default=None)


@contextmanager
def wanted_until(ended: threading.Event) -> Iterator[None]:
    """What this thread does inside is wanted until the event is set."""
    before = _ended.set(ended)
    try:
        yield
    finally:
        _ended.reset(before)


def work_until(ended: threading.Event, work: Callable[[], T]) -> Callable[[], T]:
    """The same for work that another thread will do."""
    context = copy_context()
    context.run(_ended.set, ended)
    return partial(context.run, work)


def require_wanted() -> None:
    """Raise Cancelled when nobody waits for the work of this thread any more; for loops that may take seconds."""
    ended = _ended.get()
    if ended is not None and ended.is_set():
        raise Cancelled("nobody waits for it any more")
