"""The process of an engine, from its client's side: started, waited for, ended. It ends when its socket does."""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from kvarn.child_process import exit_code
from kvarn.engine.process.messages import Progress, Ready, Returned, Start
from kvarn.errors import BackendError
from kvarn.observe.logs import JsonFormatter

HOST = "kvarn.engine.process.host"


class EngineChild:
    """One child process and the socket to it; `imports`: a module that it imports until start() names its model."""

    def __init__(self, imports: str = "") -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", HOST, str(theirs.fileno()), *([imports] if imports else [])],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints must not mix with answers
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C in a terminal must not reach it
                )
            except OSError as error:
                raise BackendError(f"no process could be started for the engine: {error}") from error
            self.connection: Connection = Connection(ours.detach())

    def start(self, start: Start) -> None:
        """Say what to load."""
        with suppress(OSError):  # it has died already: until_ready() finds out
            self.connection.send_bytes(pickle.dumps(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_ready(self, on_load: Callable[[int, int], None] | None) -> Ready:
        """Wait until the model is loaded; raise why it was not."""
        while True:
            try:
                messages = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                raise BackendError(f"{self.how_it_ended()} while the model was loaded") from None
            for message in messages:
                if isinstance(message, Ready):
                    return message  # the last before it is asked for anything
                if isinstance(message, Returned):
                    assert message.error is not None
                    raise message.error.error()
                if isinstance(message, Progress) and on_load is not None:
                    on_load(message.done, message.total)

    def how_it_ended(self) -> str:
        """For a message, once the socket has ended."""
        code = exit_code(self._process)
        name = f"the engine's process {self._process.pid}"
        if code is None:
            return f"{name} closed its socket"
        return f"{name} ended with exit code {code}" if code >= 0 else f"{name} was killed by {_signal_name(-code)}"

    def end_within(self, timeout_s: float) -> None:
        """Wait for its end, and kill it when the time is over."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End it at once; without effect on one that has ended."""
        self._process.kill()
        self._process.wait()


def current_log_level() -> str | None:
    """The level of this program's logs, if they are written as JSON: then the child's are, too."""
    logger = logging.getLogger("kvarn")
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)
    return logging.getLevelName(logger.level).lower() if is_json else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
