"""A worker of `kvarn batch --workers`: `python -m kvarn.server.batches.workers.worker FD`. A server without sockets.

Answers what it is asked until nobody is at the other end of its socket, however that ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from kvarn.engine.process.messages import PackedError
from kvarn.observe.logs import configure_logging
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.batches.in_process import InProcess
from kvarn.server.batches.workers.messages import (
    BEAT_S,
    Answered,
    Ask,
    Beat,
    Begin,
    Message,
    Started,
    read_message,
    write_message,
)
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig


class BatchWorker:
    """One process. For one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Load, then answer; ends the process when nobody asks any more, also while it loads."""
        begin = await read_message(self._reader)
        if isinstance(begin, Begin):
            starting = asyncio.create_task(self._start(begin.config))
            asking = asyncio.create_task(read_message(self._reader))
            await asyncio.wait({starting, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.result() is not None:
                await self._answer_all(await starting, asking)
        os._exit(0)  # a load or an answer under way has nobody who wants it

    async def _start(self, config: ServerConfig) -> InProcess | None:
        state = make_state(config)
        try:
            await state.models.start()
        except Exception as error:
            write_message(self._writer, Started(PackedError.of(error)))
            return None
        state.lifecycle.become_ready()
        write_message(self._writer, Started(None))
        self._running.add(asyncio.create_task(self._beat()))
        return InProcess(state)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            write_message(self._writer, Beat())

    async def _answer_all(self, server: InProcess | None, asking: asyncio.Task[Message | None]) -> None:
        asked = await asking
        while isinstance(asked, Ask):
            assert server is not None, "nobody asks a worker that has not started"
            task = asyncio.create_task(self._answer(server, asked))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            asked = await read_message(self._reader)

    async def _answer(self, server: InProcess, asked: Ask) -> None:
        answer = await server.ask(ANONYMOUS, asked.url, asked.body)
        write_message(self._writer, Answered(asked.number, answer))


async def main() -> None:
    configure_logging("error")
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))
    await BatchWorker(reader, writer).run()


if __name__ == "__main__":
    asyncio.run(main())
