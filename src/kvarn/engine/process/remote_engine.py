"""An engine in another process, as EngineClient sees it: the same calls as EngineThread, and a copy of every request.

    any thread       submit, call, cancel: a message for the sending thread
    reading thread   a step's message: tokens are appended to the copies, events go to their collectors

The copies are what readers look at: they say how far a request is, and grow as the engine's own do, a moment later.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.engine_arbiter import CLOSED
from kvarn.engine.handle import OutputCollector, settle
from kvarn.engine.inbox import fresh, refuse_while_draining
from kvarn.engine.process.child import EngineChild
from kvarn.engine.process.copies import RequestCopies
from kvarn.engine.process.messages import (
    Accepted,
    Alive,
    Call,
    Cancel,
    Close,
    Failed,
    Ready,
    Returned,
    StepDone,
    Submit,
    pack_function,
    pack_submissions,
    take_all,
)
from kvarn.engine.stream import Stream
from kvarn.engine.submission import Submission
from kvarn.engine.thread import GAVE_UP
from kvarn.errors import BackendError, InvalidParameter, KvarnError, RequestError
from kvarn.kv.cache import KVCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Submitted:
    """What waits to be accepted."""

    numbers: tuple[int, ...]
    submissions: list[Submission]
    collectors: tuple[OutputCollector, ...]
    accepted: Future[None]


class RemoteEngine:
    """Owns the socket; the process ends with it."""

    def __init__(self, child: EngineChild, facts: Ready, admission: Admission, stream: Stream) -> None:
        self.config = facts.config
        self.admission = admission
        self.kv: KVCache = admission.kv  # its size; nothing is held in it here
        self.num_waiting = 0
        self.step_timeout_s = facts.config.step_timeout_s
        self.heartbeat = time.monotonic()
        self.is_draining = False
        self.is_stopping = False
        self.on_step: tuple[Callable[[], None], ...] = ()
        self.thread = threading.Thread(target=self._read, name="kvarn-receive", daemon=True)
        self._child = child
        self._connection: Connection = child.connection
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="kvarn-send", daemon=True)
        self._numbers = itertools.count(1)
        self._submitted: dict[int, _Submitted] = {}  # by their first number, until they are accepted
        self._calls: dict[int, Future[Any]] = {}
        self._collectors: dict[int, OutputCollector] = {}
        self._copies = RequestCopies(stream)
        self._failure: KvarnError | None = None  # why nothing is accepted
        self.release: Callable[[], None] = lambda: None  # called once, at the end

    @property
    def max_batch_tokens(self) -> int:
        return self.config.max_batch_tokens

    def start(self) -> None:
        self.thread.start()
        self._sender.start()

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    @property
    def busy_s(self) -> float:
        """Time since the last sign of life while there is work; 0.0 while idle."""
        return time.monotonic() - self.heartbeat if self._is_busy else 0.0

    @property
    def sign_of_life(self) -> tuple[float, int] | None:
        """Differs from the last one as long as messages come; None while idle."""
        return (self.heartbeat, 0) if self._is_busy else None

    @property
    def _is_busy(self) -> bool:
        return bool(self._collectors or self._calls)

    def submit(self, submissions: Sequence[Submission], collectors: Sequence[OutputCollector]) -> Future[None]:
        """Queue submissions all together; the future tells whether they were accepted."""
        accepted: Future[None] = Future()
        try:
            refuse_while_draining(self.is_draining)
            pairs = zip(map(self.admission.admit, submissions), collectors, strict=True)
            checked = [_for_reader(*pair) for pair in pairs]
            packed = pack_submissions(checked)
        except BaseException as error:
            accepted.set_exception(error)
            return accepted
        sent = _Submitted(tuple(next(self._numbers) for _ in collectors), checked, tuple(collectors), accepted)
        self._begin_work()
        self._submitted[sent.numbers[0]] = sent
        for number, collector in zip(sent.numbers, collectors, strict=True):
            self._collectors[number] = collector
            collector.on_cancel = partial(self._outbox.put, Cancel(number))
        readers = tuple((one.reads_tokens, one.polls_tokens) for one in collectors)
        has_constraints = any(one.has_constraints for one in checked)
        self._put(Submit(sent.numbers, readers, packed, has_constraints))
        return accepted

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function of a module between two steps, in the engine's process."""
        return self._call(function, 0, None)

    def compute(self, function: Callable[[Engine], T], num_tokens: int, priority: int) -> Future[T]:
        """The same for a function that computes."""
        return self._call(function, num_tokens, priority)

    def begin_drain(self) -> Future[list[OutputCollector]]:
        """Accept nothing more; what still runs."""
        self.is_draining = True
        running: Future[list[OutputCollector]] = Future()
        running.set_result(list(self._collectors.values()))
        return running

    def ask_to_stop(self) -> None:
        self.is_stopping = True
        self._outbox.put(Close())

    def stop(self, timeout_s: float) -> bool:
        """End the process, at the latest when the time is over."""
        self.ask_to_stop()
        self._child.end_within(timeout_s)
        if threading.current_thread() is not self.thread:
            self.thread.join()  # it reads the end of the socket
        return True

    def _call(self, function: Callable[[Engine], T], num_tokens: int, priority: int | None) -> Future[T]:
        result: Future[T] = Future()
        try:
            packed = pack_function(function)
        except KvarnError as error:
            result.set_exception(error)
            return result
        number = next(self._numbers)
        self._begin_work()
        self._calls[number] = result
        result.add_done_callback(partial(self._forget_call, number))
        self._put(Call(number, packed, num_tokens, priority))
        return result

    def _forget_call(self, number: int, result: Future[Any]) -> None:
        if self._calls.pop(number, None) is not None and result.cancelled():
            self._outbox.put(Cancel(number))

    def _begin_work(self) -> None:
        """Time in which there was nothing to do does not count as a silence."""
        if not self._is_busy:
            self.heartbeat = time.monotonic()

    def _put(self, message: Submit | Call) -> None:
        self._outbox.put(message)
        if self._failure is not None:  # read after the put: whoever sets it fails all that is there afterwards
            self._fail_all(self._failure)

    def _send(self) -> None:
        try:
            is_over = False
            while not is_over:
                messages = take_all(self._outbox)
                is_over = any(isinstance(one, Close) for one in messages)
                self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))
        except OSError:
            pass  # the process has ended, which the reading thread sees

    def _read(self) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            StepDone: self._end_step,
            Accepted: self._accept,
            Returned: self._return,
            Failed: self._fail,
            Alive: lambda _: None,
        }
        try:
            while True:
                messages = pickle.loads(self._connection.recv_bytes())
                self.heartbeat = time.monotonic()
                for message in messages:
                    handlers[type(message)](message)
        except (EOFError, OSError):
            reason = self._child.how_it_ended()
        except BaseException as error:  # only we can have broken it: nobody shall wait for ever
            reason = f"a message of the engine's process could not be read: {error!r}"
        self._child.kill()
        self._failure = RequestError(CLOSED) if self.is_stopping else BackendError(GAVE_UP.format(reason))
        self._fail_all(self._failure)
        self.release()

    def _accept(self, message: Accepted) -> None:
        if (sent := self._submitted.pop(message.number, None)) is None:
            return
        for submission, collector, told in zip(sent.submissions, sent.collectors, message.requests, strict=True):
            collector.open(self._copies.open(submission, told))
        settle(sent.accepted, result=None)

    def _return(self, message: Returned) -> None:
        error = None if message.error is None else message.error.error()
        if (sent := self._submitted.pop(message.number, None)) is not None:
            for number in sent.numbers:
                self._release(number)
            settle(sent.accepted, error=error)
        elif (result := self._calls.pop(message.number, None)) is not None:
            settle(result, result=message.result, error=error)

    def _end_step(self, message: StepDone) -> None:
        self.num_waiting = message.num_waiting
        self._copies.advance(message)
        ended: list[int] = []
        for number, event in message.events:
            if (collector := self._collectors.get(number)) is not None:  # else it has failed meanwhile
                collector.add(event)
                if event.finish_reason is not None and all(one.is_ended for one in collector.requests):
                    ended.append(number)
        for number in ended:
            self._release(number)
        for tell in self.on_step:
            tell()

    def _fail(self, message: Failed) -> None:
        collector = self._release(message.number)
        if collector is not None:
            error = message.error.error()
            self._copies.fail(collector.requests, error)
            collector.fail(error)

    def _release(self, number: int) -> OutputCollector | None:
        collector = self._collectors.pop(number, None)
        if collector is not None:
            collector.on_cancel = None
        return collector

    def _fail_all(self, failure: KvarnError) -> None:
        """Each of them once, whichever threads do this."""
        for number in list(self._submitted):
            if (sent := self._submitted.pop(number, None)) is not None:
                settle(sent.accepted, error=fresh(failure))
        for number in list(self._collectors):
            if (collector := self._release(number)) is not None:
                collector.fail(fresh(failure))
        for number in list(self._calls):
            if (result := self._calls.pop(number, None)) is not None:
                settle(result, error=fresh(failure))


def _for_reader(submission: Submission, collector: OutputCollector) -> Submission:
    """The checked submission, its prompt once, and how it is read."""
    assert submission.admitted is not None
    if submission.params.sampler is not None:
        raise InvalidParameter(
            f"sampler is {submission.params.sampler!r}, a function of this process, and the engine runs in its own; "
            "load the model with own_process=False",
            field="sampler",
        )
    is_polled = collector.polls_tokens and submission.wants_text_alone
    return replace(submission, prompt_ids=submission.admitted.prompt_ids, is_polled=is_polled)
