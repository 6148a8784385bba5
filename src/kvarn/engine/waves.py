"""More submissions than an engine should queue: a number of them at once, and one more for each that ends.

Knows collectors and how to submit; never sees a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvarn.engine.handle import OutputCollector
from kvarn.engine.submission import Submission

Submit = Callable[[Sequence[Submission], Sequence[OutputCollector]], "Future[None]"]


class Waves:
    """The submissions that are left; the thread that ends an answer submits the next."""

    def __init__(
        self, submit: Submit, submissions: Sequence[Submission], collectors: Sequence[OutputCollector]
    ) -> None:
        self._submit = submit
        self._left = deque(zip(submissions, collectors, strict=True))

    def start(self, count: int) -> Future[None]:
        """Submit the first of them, together; the future tells whether they were accepted."""
        first = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        for _, collector in (*first, *self._left):
            collector.done.add_done_callback(self._submit_next)
        return self._submit([submission for submission, _ in first], [collector for _, collector in first])

    def stop(self) -> None:
        """Submit nothing more; nobody waits for the rest."""
        self._left.clear()

    def _submit_next(self, ended: Future[Any]) -> None:
        if (error := ended.exception()) is not None:
            self._give_up(error)
        try:
            submission, collector = self._left.popleft()
        except IndexError:  # all are submitted, or another thread has stopped it
            return
        self._submit([submission], [collector]).add_done_callback(partial(self._accepted, collector))

    def _accepted(self, collector: OutputCollector, accepted: Future[None]) -> None:
        if (error := accepted.exception()) is not None:
            collector.fail(error)  # and the rest with it, as that ends it

    def _give_up(self, error: BaseException) -> None:
        left = [collector for _, collector in self._left]
        self._left.clear()  # first: each that fails asks for the next
        for collector in left:
            collector.fail(error)
