"""PDFs and HTML of clients to text, in processes of their own with limits on time, memory, pages and characters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvarn.errors import ConfigError, DocumentError
from kvarn.server.access.priority_semaphore import PrioritySemaphore
from kvarn.server.failures import RetrievalUnavailable

Kind = Literal["pdf", "html"]
OK = 0  # the first byte of the child's answer


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """What one PDF, or all the pages of one request, may cost."""

    max_pages: int = 2_000
    max_chars: int = 4_000_000
    memory_bytes: int = 512 << 20  # beyond what the idle child has mapped
    cpu_s: int = 10
    deadline_s: float = 60.0  # of waiting, on a machine that has no time for the child


class DocumentReader:
    """Reads the PDFs of all clients, and their HTML, a few at a time. Lives in one event loop."""

    def __init__(self, limits: ReadingLimits | None = None, max_at_once: int = 2) -> None:
        self._limits = limits or ReadingLimits()
        self._places = PrioritySemaphore(max_at_once, 0)

    async def text_of(self, data: bytes, source: str) -> str:
        """The text of a file; DocumentError with the reason if there is none. Ends the child when cancelled."""
        from kvarn.retrieval.extras import require

        try:
            require("pypdf")
        except ConfigError as error:
            raise RetrievalUnavailable(str(error)) from None
        return await self._parsed("pdf", data, source)

    async def texts_of_html(self, pages: Sequence[str], source: str) -> list[str]:
        """The readable texts of pages, read by one child; otherwise the same."""
        data = await asyncio.to_thread(lambda: json.dumps(list(pages)).encode())
        told = await self._parsed("html", data, source)
        texts: list[str] = await asyncio.to_thread(json.loads, told)
        return texts

    async def _parsed(self, kind: Kind, data: bytes, source: str) -> str:
        priority = await self._places.take()
        try:
            answer = await self._answer(kind, data)
        finally:
            self._places.leave(priority)
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

    async def _answer(self, kind: Kind, data: bytes) -> bytes:
        """What a child says; nothing if it was ended."""
        child = await asyncio.create_subprocess_exec(
            *self._command(kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for us, not for it
        )
        try:
            answer, _ = await asyncio.wait_for(child.communicate(data), self._limits.deadline_s)
        except TimeoutError:
            return b""
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return answer

    def _command(self, kind: Kind) -> list[str]:
        from kvarn.retrieval.ingest.pdf import CHILD

        limits = self._limits
        numbers = (limits.max_pages, limits.max_chars, limits.memory_bytes, limits.cpu_s)
        return [sys.executable, "-I", "-B", str(CHILD), json.dumps(sys.path), kind, *map(str, numbers)]
