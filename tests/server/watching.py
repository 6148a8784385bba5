"""Somebody who asks for the health all the time, and somebody whose paid answers are streamed, while others attack."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.server.keyed import KeyedServer, completion_body
from tests.server.test_tiers import Times, stream

PAUSE_S = 0.02
PROBE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
STREAMED = {"stream": True, "ignore_eos": True, "max_tokens": 400}


@dataclass(slots=True)
class Seen:
    """Seconds until probes were answered, and between the tokens of paid streams."""

    probes: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "num_probes": len(self.probes),
            "num_gaps": len(self.gaps),
            "probe_p99_s": percentile(self.probes, 0.99),
            "probe_max_s": max(self.probes),
            "gap_p50_s": percentile(self.gaps, 0.5),
            "gap_p99_s": percentile(self.gaps, 0.99),
            "gap_max_s": max(self.gaps),
        }


class Watch:
    """Runs in a thread with a loop of its own."""

    def __init__(self, keyed: KeyedServer) -> None:
        self.seen = Seen()
        self.keyed = keyed
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def during(self, seconds: float) -> Seen:
        """What is seen from now on for some seconds."""
        self.seen = seen = Seen()
        time.sleep(seconds)
        self.seen = Seen()
        return seen

    def end(self) -> None:
        self._is_over = True
        self._thread.join(60)

    async def _run(self) -> None:
        await asyncio.gather(self._probe(), self._listen())

    async def _probe(self) -> None:
        while not self._is_over:
            seen, began = self.seen, time.perf_counter()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.keyed.process.port)
                writer.write(PROBE)
                answer = await reader.read()
                writer.close()
                if not answer.startswith(b"HTTP/1.1 200"):
                    seen.failures.append(answer[:100].decode(errors="replace"))
            except OSError as error:
                seen.failures.append(repr(error))
            seen.probes.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)

    async def _listen(self) -> None:
        while not self._is_over:
            await stream(
                self.keyed.process.port,
                self.keyed.keys["alice"],
                completion_body("Once upon a time", **STREAMED),
                lambda: Times(between=self.seen.gaps),
            )


@contextmanager
def watching(keyed: KeyedServer) -> Iterator[Watch]:
    watch = Watch(keyed)
    try:
        yield watch
    finally:
        watch.end()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
