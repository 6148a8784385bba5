"""Clients' files and HTML to text, in child processes with limits on time, memory, pages and characters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvarn.child_process import CHECK_S, StopCheck, was_killed
from kvarn.errors import CapacityError, ConfigError, DocumentError, HelperUnavailable
from kvarn.server.access.priority_semaphore import Claim, PrioritySemaphore
from kvarn.server.failures import RetrievalUnavailable

FileKind = Literal["pdf", "docx", "epub", "notebook"]
Kind = Literal[FileKind, "html"]
CHILD = Path(__file__).with_name("document_reader_child.py")
NOBODY = Claim()
OK = 0  # the first byte of the child's output


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Limits on one file, or on all the HTML pages of one request."""

    max_pages: int = 2_000
    max_chars: int = 4_000_000
    memory_bytes: int = 512 << 20  # beyond what the idle child has mapped
    cpu_s: int = 10
    deadline_s: float = 60.0  # wall clock: an overloaded machine may never schedule the child


class DocumentReader:
    """Reads the files and the HTML of all clients, max_at_once at a time and one for each key. For one event loop."""

    def __init__(self, limits: ReadingLimits | None = None, max_at_once: int = 2) -> None:
        self._limits = limits or ReadingLimits()
        # One more for a caller of a higher priority: a child may read for as long as its limits allow.
        self._slots = PrioritySemaphore(max_at_once + 1, num_reserved=1, max_per_owner=1)

    async def file_text(self, kind: FileKind, data: bytes, source: str, claim: Claim = NOBODY) -> str:
        """The text of a file; DocumentError with the reason if there is none. Kills the child when cancelled."""
        from kvarn.retrieval.extras import require

        try:
            if kind == "pdf":
                require("pypdf")
        except ConfigError as error:
            raise RetrievalUnavailable(str(error)) from None
        return await self._parsed(kind, data, source, claim)

    async def html_texts(self, pages: Sequence[str], source: str, claim: Claim = NOBODY) -> list[str]:
        """The readable texts of HTML pages, all parsed by one child; errors as of file_text."""
        data = await asyncio.to_thread(lambda: json.dumps(list(pages)).encode())
        output = await self._parsed("html", data, source, claim)
        texts: list[str] = await asyncio.to_thread(json.loads, output)
        return texts

    async def _parsed(self, kind: Kind, data: bytes, source: str, claim: Claim) -> str:
        await self._slots.acquire(claim)
        try:
            try:
                output = await self._child_output(kind, data)
            except HelperUnavailable:  # no fault of the document: another child tries
                output = await self._child_output(kind, data)
        finally:
            self._slots.release(claim)
        if not output:
            raise DocumentError(
                f"takes more than {self._limits.cpu_s} s or {self._limits.memory_bytes >> 20} MiB to be read; split "
                "it, or save it anew",
                source=source,
            )
        text = output[1:].decode()
        if output[0] != OK:
            raise DocumentError(text, source=source)
        return text

    async def _child_output(self, kind: Kind, data: bytes) -> bytes:
        """All that a child process writes; nothing if its limits ended it."""
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command(kind),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must not reach it
            )
        except OSError as error:
            raise HelperUnavailable(f"no process could be started to read the document: {error}") from error
        reading = asyncio.ensure_future(child.communicate(data))
        try:
            await self._until_done(reading, child.pid)
        finally:
            reading.cancel()  # without effect on one that is done
            with suppress(ProcessLookupError):
                child.kill()
            returncode = await child.wait()
        if was_killed(returncode):
            raise HelperUnavailable("the process that reads documents was killed; try again")
        return reading.result()[0]

    async def _until_done(self, reading: asyncio.Future[tuple[bytes, bytes]], pid: int) -> None:
        loop = asyncio.get_running_loop()
        ends_at, stop = loop.time() + self._limits.deadline_s, StopCheck(pid)
        while not (await asyncio.wait({reading}, timeout=min(CHECK_S, max(ends_at - loop.time(), 0.0))))[0]:
            if stop.is_stopped():
                raise HelperUnavailable("the process that reads documents was stopped; try again")
            if loop.time() >= ends_at:
                raise CapacityError("the machine is too busy to read the document; try again", retry_after_s=1.0)

    def _command(self, kind: Kind) -> list[str]:
        limits = self._limits
        numbers = (limits.max_pages, limits.max_chars, limits.memory_bytes, limits.cpu_s)
        return [sys.executable, "-I", "-B", str(CHILD), json.dumps(sys.path), kind, *map(str, numbers)]
