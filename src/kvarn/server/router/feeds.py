"""Listens to every replica: one task each that connects, proves the cluster key, reads lines and starts over.

What is told goes to the fleet; a conversation that breaks, is forged or has a gap is begun anew, with everything.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kvarn.observe.logs import with_fields
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.feed import MAX_LINE_BYTES, PATH, PROOF_HEADER, FeedError, FeedReader
from kvarn.routing.fleet import SILENT_S, Fleet
from kvarn.server.router.exchange import Upstream, UpstreamExchange, UpstreamFailed, UpstreamRequest, read_all

log = logging.getLogger("kvarn.router")
RETRY_S = 0.5  # between two attempts
REFUSED_S = 5.0  # after one that an operator must look at
GIVE_UP_TRIES = 2  # attempts in a row that nothing answered: a replica that is only busy may miss one
MAX_REFUSAL_BYTES = 64 << 10


class FeedRefused(FeedError):
    """A replica that must not be asked: it differs, or does not know the key."""


class ReplicaFeeds:
    """The tasks of one router. give_up: called with the number of a replica that is frozen or cut off."""

    def __init__(
        self, fleet: Fleet, pools: Sequence[Upstream], key: ClusterKey, give_up: Callable[[int], None] | None = None
    ) -> None:
        self.first_tries = [asyncio.Event() for _ in pools]  # set when a replica was asked for the first time
        self._fleet = fleet
        self._pools = pools
        self._key = key
        self._give_up = give_up
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._listen(number)) for number in range(len(self._pools))]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _listen(self, number: int) -> None:
        name, told, num_silent = self._fleet.replicas[number].name, "", 0
        while True:
            wait_s, phase, reason, is_silent = RETRY_S, "connecting", "", False
            try:
                await self._converse(number)
            except FeedRefused as error:
                wait_s, phase, reason = REFUSED_S, "refused", str(error)
            except (UpstreamFailed, FeedError, OSError, TimeoutError) as error:
                reason = str(error) or f"it told nothing for {SILENT_S:g} s"
                is_silent = isinstance(error, TimeoutError) or (isinstance(error, UpstreamFailed) and error.is_silent)
            num_silent = num_silent + 1 if is_silent else 0
            if num_silent >= GIVE_UP_TRIES and self._give_up is not None:
                self._give_up(number)
            self._fleet.lose(number, phase, reason)
            if reason != told:
                log.warning("a replica is not asked", extra=with_fields(replica=name, phase=phase, reason=reason))
            told = reason
            self.first_tries[number].set()
            await asyncio.sleep(wait_s)

    async def _converse(self, number: int) -> None:
        pool, reader = self._pools[number], FeedReader(self._key)
        connection, _ = await pool.take(is_new=True)
        try:
            headers = [(PROOF_HEADER.encode(), reader.proof.encode()), (b"accept", b"application/x-ndjson")]
            await asyncio.wait_for(connection.begin(UpstreamRequest("GET", PATH.encode(), headers)), SILENT_S)
            if connection.status != 200:
                await _refuse(connection)
            lines = _lines(connection)
            if not self._fleet.greet(number, reader.hello(await anext(lines))):
                raise FeedRefused(self._fleet.replicas[number].reason)
            async for line in lines:
                self._fleet.hear(number, reader.frame(line))
                if not self.first_tries[number].is_set():
                    self.first_tries[number].set()
                    log.info("a replica is asked", extra=with_fields(replica=self._fleet.replicas[number].name))
        finally:
            connection.abort()


async def _refuse(connection: UpstreamExchange) -> None:
    body = await read_all(connection, MAX_REFUSAL_BYTES)
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = "no Kvarn server answers there"
    kind = FeedRefused if connection.status != 503 else FeedError  # 503: it starts, or ends
    raise kind(f"status {connection.status}: {reason}")


async def _lines(connection: UpstreamExchange) -> AsyncIterator[bytes]:
    """Lines as they come; TimeoutError when none does for too long."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        data = await asyncio.wait_for(connection.read(), SILENT_S)
        if not data:
            raise UpstreamFailed("the replica ended its report")
        *whole, rest = data.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line])
            parts, num_bytes = [], 0
        parts.append(rest)
        num_bytes += len(rest)
        if num_bytes > MAX_LINE_BYTES:
            raise FeedRefused(f"a line of the replica has more than {MAX_LINE_BYTES:,} bytes")
