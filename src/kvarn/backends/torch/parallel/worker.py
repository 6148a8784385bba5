"""The process of one rank other than 0: `python -m kvarn.backends.torch.parallel.worker FD`.

Does what rank 0 tells it through the pipe FD, in that order, and ends when the pipe does.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from kvarn.backends.batch import Batch
from kvarn.backends.torch.parallel.groups import connect
from kvarn.backends.torch.parallel.rank import RankBackend
from kvarn.backends.torch.parallel.workers import RankSetup
from kvarn.backends.torch.resumable import TorchResumableForward
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec

Command = tuple[str, tuple[Any, ...]]


class RankServer:
    """The calls of rank 0, carried out on this rank's share."""

    def __init__(self, setup: RankSetup, connection: Connection) -> None:
        self._connection = connection
        connection.send(("done", "start"))
        ranks = connect(setup.place, setup.device, setup.store, setup.timeout_s)
        self._make: Callable[[], RankBackend] = lambda: RankBackend(setup.device, setup.threads, ranks)
        self._backend = self._make()
        self._passage: TorchResumableForward | None = None

    def load(self, spec: ModelSpec, path: str) -> None:
        """Load this rank's share of the file that rank 0 has open."""
        self._passage = None
        self._backend.close()
        self._backend = self._make()
        source = open_weights(path)
        try:
            self._backend.load(spec, describe(source).weights)
        finally:
            source.close()
        self._connection.send(("done", "load"))

    def reserve_blocks(self, *arguments: Any) -> None:
        self._backend.reserve_blocks(*arguments)
        self._connection.send(("done", "reserve"))

    def begin(self, batch: Batch) -> None:
        self._passage = self._backend.begin(batch)

    @torch.inference_mode()
    def run_next(self) -> None:
        assert self._passage is not None, "a forward pass is begun before it is continued"
        self._passage.run_next()

    def call(self, command: Command) -> None:
        """One command: a method of this class, else of the backend."""
        method, arguments = command
        getattr(self if hasattr(self, method) else self._backend, method)(*arguments)


def main() -> None:
    """Serve until told to close."""
    connection: Connection = Connection(int(sys.argv[1]))
    setup: RankSetup = connection.recv()
    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, setup, commands), daemon=True).start()
    try:
        server = RankServer(setup, connection)
        while (command := commands.get())[0] != "close":
            server.call(command)
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):
            connection.send(("failed", f"failed: {type(error).__name__}: {error}"))
        _leave(setup, 1)
    _leave(setup, 0)


def _read(connection: Connection, setup: RankSetup, commands: SimpleQueue[Command]) -> None:
    """Read ahead, so that the end of rank 0 is seen while this rank waits for it in a sum."""
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            _leave(setup, 0)


def _leave(setup: RankSetup, code: int) -> NoReturn:
    """End at once: no destructor may wait for ranks that wait for this one. Rank 0 may be gone, so tidy up."""
    shutil.rmtree(setup.store.parent, ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    main()
