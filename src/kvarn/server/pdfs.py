"""PDFs of clients to text: each in a process of its own with limits on time, memory, pages and characters."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass

from kvarn.errors import ConfigError, DocumentError
from kvarn.server.failures import RetrievalUnavailable

OK = 0  # the first byte of the child's answer


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """What one PDF may cost."""

    max_pages: int = 2_000
    max_chars: int = 4_000_000
    memory_bytes: int = 512 << 20  # beyond what the idle child has mapped
    cpu_s: int = 10
    deadline_s: float = 60.0  # of waiting, on a machine that has no time for the child


class PdfReader:
    """Reads the PDFs of all clients, a few at a time. Lives in one event loop."""

    def __init__(self, limits: ReadingLimits | None = None, max_at_once: int = 2) -> None:
        self._limits = limits or ReadingLimits()
        self._places = asyncio.Semaphore(max_at_once)

    async def text_of(self, data: bytes, source: str) -> str:
        """The text of a file; DocumentError with the reason if there is none. Ends the child when cancelled."""
        async with self._places:
            child = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for us, not for it
            )
            try:
                answer, _ = await asyncio.wait_for(child.communicate(data), self._limits.deadline_s)
            except TimeoutError:
                answer = b""
            finally:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if not answer:
            raise DocumentError(
                f"takes more than {self._limits.cpu_s} s or {self._limits.memory_bytes >> 20} MiB to be read; split "
                "it, or save it anew",
                source=source,
            )
        told = answer[1:].decode()
        if answer[0] != OK:
            raise DocumentError(told, source=source)
        return told

    def _command(self) -> list[str]:
        from kvarn.retrieval.extras import require
        from kvarn.retrieval.ingest.pdf import CHILD

        try:
            require("pypdf")
        except ConfigError as error:
            raise RetrievalUnavailable(str(error)) from None
        limits = self._limits
        numbers = (limits.max_pages, limits.max_chars, limits.memory_bytes, limits.cpu_s)
        return [sys.executable, "-I", "-B", str(CHILD), json.dumps(sys.path), *map(str, numbers)]
