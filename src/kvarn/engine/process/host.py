"""The process of an engine: `python -m kvarn.engine.process.host FD [MODULE]`. Runs the same EngineThread as any other
program; imports the module while it is not told yet what to load.

reading thread   what the client asks becomes calls for the engine's thread; ends the process when the socket ends
engine's thread  after each step, all that it gave becomes one message
sending thread   pickles and sends: a client that does not read holds up no step
main thread      loads the model, then tells that a long step advances; ends when the engine does
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from kvarn.engine.engine_arbiter import process_arbiter
from kvarn.engine.handle import OutputCollector
from kvarn.engine.load import LoadedModel, load_model
from kvarn.engine.persistence.open_store import start_disk
from kvarn.engine.process.messages import (
    Accepted,
    AcceptedRequest,
    Alive,
    Call,
    Cancel,
    Close,
    Failed,
    PackedError,
    Progress,
    Ready,
    Returned,
    Start,
    Submit,
    take_all,
    unpack_submissions,
)
from kvarn.engine.process.step_report import StepReport
from kvarn.engine.thread import EngineThread
from kvarn.observe.logs import configure_logging
from kvarn.structured.compiler import MAX_COMPILING, ConstraintCompiler
from kvarn.types import Completion

LOAD = 0  # the number of the load, among those of submissions and calls
ALIVE_EVERY_S = 0.2
FLUSH_S = 5.0  # for the last messages to be sent
YOUNG_OBJECTS = 10_000  # made before young ones are looked through for cycles


class EngineHost:
    """One engine behind one socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._calls: dict[int, Future[Any]] = {}
        self._collectors: dict[int, OutputCollector] = {}
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, "kvarn-compile")
        self._sender = threading.Thread(target=self._send, name="kvarn-send", daemon=True)

    def run(self, start: Start) -> int:
        """Load the model and serve it until the client or the engine ends; returns the exit code."""
        threading.Thread(target=self._read, name="kvarn-receive", daemon=True).start()
        self._sender.start()
        try:
            self._open(start)
        except BaseException as error:
            self._outbox.put(Returned(LOAD, error=PackedError.of(error)))
            self._flush()
            return 1
        self._watch()
        self._flush()
        return 0 if self._thread.is_stopping else 1

    def _open(self, start: Start) -> None:
        model = load_model(start.path, start.config, lambda *done: self._outbox.put(Progress(*done)))
        self._model = model
        self._compiler = ConstraintCompiler(model.tokenizer, model.spec.vocab_size)
        config = model.engine.config
        self._thread = EngineThread(
            model.engine, start.config.step_timeout_s, model.close, process_arbiter(config.device)
        )
        self._report = StepReport(model.engine, self._outbox.put)
        self._thread.on_step = (self._report.end_step,)
        self._thread.start()
        start_disk(model.engine, self._thread.call)
        gc.collect()
        gc.freeze()  # a full collection would walk through the model's tables while no step runs
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self._outbox.put(_facts(model))

    def _watch(self) -> None:
        """Until the engine's thread ends: tell that what takes long advances."""
        last: object = None
        thread = self._thread.thread
        while thread.is_alive():
            thread.join(ALIVE_EVERY_S)
            sign = self._thread.sign_of_life
            if sign is not None and sign != last:
                self._outbox.put(Alive())
            last = sign

    def _read(self) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Call: self._call,
            Cancel: self._cancel,
            Close: lambda _: self._thread.ask_to_stop(),
        }
        while True:
            try:
                messages = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the client is gone: nobody wants anything of this process
            for message in messages:
                handlers[type(message)](message)

    def _send(self) -> None:
        is_over = False
        while not is_over:
            taken = take_all(self._outbox)
            is_over = any(one is None for one in taken)
            messages = [one for one in taken if one is not None]
            try:
                self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))
            except OSError:  # as above
                os._exit(0)

    def _flush(self) -> None:
        self._outbox.put(None)
        self._sender.join(FLUSH_S)

    def _submit(self, message: Submit) -> None:
        collectors = [self._collector(*one) for one in zip(message.numbers, message.readers, strict=True)]
        if message.has_constraints:  # which are compiled: that takes as long as it takes
            self._compiling.submit(self._enter, message, collectors)
        else:
            self._enter(message, collectors)

    def _collector(self, number: int, reader: tuple[bool, bool]) -> OutputCollector:
        reads_tokens, polls_tokens = reader
        collector = OutputCollector(partial(self._report.add, number), keeps_events=False, polls_tokens=polls_tokens)
        collector.reads_tokens = reads_tokens
        self._collectors[number] = collector
        collector.done.add_done_callback(partial(self._settled, number))
        return collector

    def _enter(self, message: Submit, collectors: list[OutputCollector]) -> None:
        try:
            submissions = unpack_submissions(message.submissions, self._model.tokenizer, self._compiler)
        except BaseException as error:
            self._refuse(message, error)
            return
        accepted = self._thread.submit(submissions, collectors)
        accepted.add_done_callback(partial(self._entered, message, collectors))

    def _entered(self, message: Submit, collectors: list[OutputCollector], accepted: Future[None]) -> None:
        """On the engine's thread, before the first step of these requests."""
        if (error := accepted.exception()) is not None:
            self._refuse(message, error)
            return
        for collector in collectors:
            self._report.follow(collector.requests)
        told = tuple(
            tuple(AcceptedRequest(one.number, one.id, one.choice, one.seed, one.submitted_at) for one in each.requests)
            for each in collectors
        )
        self._outbox.put(Accepted(message.numbers[0], told))

    def _refuse(self, message: Submit, error: BaseException) -> None:
        for number in message.numbers:
            self._collectors.pop(number, None)
        self._outbox.put(Returned(message.numbers[0], error=PackedError.of(error)))

    def _settled(self, number: int, done: Future[Completion]) -> None:
        """A submission has ended; on the engine's thread, or on the watchdog's."""
        collector = self._collectors.pop(number, None)
        if collector is not None and (error := done.exception()) is not None:
            self._report.forget(collector.requests)
            self._outbox.put(Failed(number, PackedError.of(error)))

    def _call(self, message: Call) -> None:
        try:
            function = pickle.loads(message.function)
            if message.priority is None:
                result = self._thread.call(function)
            else:
                result = self._thread.compute(function, message.num_tokens, message.priority)
        except BaseException as error:
            self._outbox.put(Returned(message.number, error=PackedError.of(error)))
            return
        self._calls[message.number] = result
        result.add_done_callback(partial(self._returned, message.number))

    def _returned(self, number: int, result: Future[Any]) -> None:
        self._calls.pop(number, None)
        if result.cancelled():
            return
        error = result.exception()
        told = Returned(number, result.result()) if error is None else Returned(number, error=PackedError.of(error))
        self._outbox.put(told)

    def _cancel(self, message: Cancel) -> None:
        if (collector := self._collectors.get(message.number)) is not None:
            collector.cancel()
        elif (call := self._calls.get(message.number)) is not None:
            call.cancel()


def _facts(model: LoadedModel) -> Ready:
    engine = model.engine
    return Ready(
        config=engine.config,
        memory=model.memory,
        context=engine.admission.context,
        num_blocks=engine.kv.num_blocks,
        block_size=engine.kv.block_size,
        backend=model.backend.name,
        isa=str(getattr(model.backend, "isa", model.backend.name)),
    )


def main() -> None:
    """Serve the client at the other end of the socket."""
    connection: Connection = Connection(int(sys.argv[1]))
    for module in sys.argv[2:]:
        with suppress(Exception):  # loading the model fails in the same way, and is told
            import_module(module)
    try:
        start: Start = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the client ended before it knew its model
    if start.log_level is not None:
        configure_logging(start.log_level)
    # At once: no destructor of a device may keep a process that nobody needs.
    os._exit(EngineHost(connection).run(replace(start, config=replace(start.config, own_process=False))))


if __name__ == "__main__":
    main()
