"""The router process: bind, listen to replicas, print one line when they were asked, route, drain, exit code.

Sockets, deadlines and limits are those of a server, and so are the phases of its life; models it has none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvarn.checks import check_setting
from kvarn.errors import ConfigError
from kvarn.observe.logs import configure_logging, with_fields
from kvarn.routing.choice import POLICIES
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.fleet import Fleet
from kvarn.server.http.connections import Listener
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.http_server import make_http_server
from kvarn.server.process.interpreter import tune_for_serving
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.listening import listening, remove_file, shown_address
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.tls import Certificate
from kvarn.server.router.app import RouterState, make_router_app
from kvarn.server.router.discovery import DiscoveredSeat, Discovery
from kvarn.server.router.feeds import ReplicaFeeds
from kvarn.server.router.forwarding import Forwarder
from kvarn.server.router.metrics import RouterMetrics
from kvarn.server.router.upstream import CONNECT_TIMEOUT_S, ConnectionPool, ReplicaAddress

log = logging.getLogger("kvarn.router")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_S = 3.0  # for answers to send their final bytes after the deadline
MAX_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How one router runs; http: its sockets, limits and drain, as a server's."""

    replicas: tuple[str, ...]
    cluster_key: Path
    http: ServerConfig
    policy: str = "prefix"
    has_open_metrics: bool = False
    discover: str | None = None  # in place of replicas: a URL whose host has an address for each
    max_replicas: int = 64  # that are discovered

    def __post_init__(self) -> None:
        check_setting.one_of("policy", self.policy, tuple(POLICIES))
        check_setting.integer("max_replicas", self.max_replicas, 1, MAX_REPLICAS)
        if self.discover is not None:
            if self.replicas:
                raise ConfigError(f"discover is {self.discover!r:.80} and replicas are given; choose one")
            ReplicaAddress.of(self.discover)
            return
        if not 1 <= len(self.replicas) <= MAX_REPLICAS:
            words = f"name 1 to {MAX_REPLICAS:,} with --replica, or a host that has their addresses with --discover"
            raise ConfigError(f"{len(self.replicas):,} replicas are given; {words}")
        urls = [ReplicaAddress.of(url).url for url in self.replicas]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ConfigError(f"the replica {twice!r:.80} is given twice; name each once")


def route(config: RouterConfig) -> int:
    """Run the router until a signal ends it; returns the exit code."""
    configure_logging(config.http.log_level)
    key = ClusterKey.read(config.cluster_key)
    certificate = None if config.http.tls_cert is None else Certificate(config.http)
    with listening(config.http) as listener:
        return asyncio.run(RouterRun(config, key, listener, certificate).run())


class RouterRun:
    """The process from listening to the exit code."""

    def __init__(
        self, config: RouterConfig, key: ClusterKey, listener: Listener, certificate: Certificate | None
    ) -> None:
        self._config = config.http
        self._listener = listener
        addresses = [ReplicaAddress.of(url) for url in config.replicas]
        names = [address.url for address in addresses]
        self._pools: Sequence[ConnectionPool | DiscoveredSeat] = [ConnectionPool(address) for address in addresses]
        self._discovery: Discovery | None = None
        if config.discover is not None:
            self._discovery = Discovery(ReplicaAddress.of(config.discover), config.max_replicas)
            names, self._pools = self._discovery.names, self._discovery.seats
        self._fleet = Fleet(names, config.policy)
        for number in range(len(names) if self._discovery is not None else 0):
            self._fleet.place(number, None)
        self._lifecycle = Lifecycle()
        metrics = RouterMetrics(names)
        self._forwarder = Forwarder(self._fleet, self._pools, key, config.http, metrics)
        self._feeds = ReplicaFeeds(self._fleet, self._pools, key, lambda number: self._pools[number].give_up_silent())
        state = RouterState(
            config=config.http,
            lifecycle=self._lifecycle,
            traffic=Traffic(),
            fleet=self._fleet,
            forwarder=self._forwarder,
            metrics=metrics,
            has_open_metrics=config.has_open_metrics,
        )
        self._server = make_http_server(state, make_router_app(state), listener, certificate)
        self._ended = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for one in SIGNALS:
            loop.add_signal_handler(one, self._take_signal, one)
        self._feeds.start()
        serving = asyncio.create_task(self._server.serve([self._listener]))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await self._start()
            await asyncio.wait([ended, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                raise RuntimeError("the HTTP server ended by itself") from serving.exception()
            await self._drain()
        finally:
            ended.cancel()
            await self._close(serving)
        return 0

    async def _start(self) -> None:
        """Wait until every replica was asked once, but not for long for one that does not answer."""
        numbers: Sequence[int] = range(len(self._pools))
        if self._discovery is not None:
            await self._discovery.look(self._fleet)
            numbers = self._discovery.taken
            self._watching = asyncio.create_task(self._discovery.watch(self._fleet))
        asked = asyncio.gather(*(self._feeds.first_tries[number].wait() for number in numbers))
        with suppress(TimeoutError):
            await asyncio.wait_for(asked, 2 * CONNECT_TIMEOUT_S)
        tune_for_serving()
        self._lifecycle.become_ready()
        number, usable = len(numbers), self._fleet.usable.bit_count()
        address = shown_address(self._listener, self._config)
        print(f"kvarn: routing to {usable} of {number} replicas on {address}", flush=True)

    async def _drain(self) -> None:
        """As a server does: accept for the delay, refuse, wait for what runs, end it at the deadline."""
        config, lifecycle = self._config, self._lifecycle
        lifecycle.drain()
        log.info("draining", extra=with_fields(requests=lifecycle.num_requests, delay_s=config.drain_delay_s))
        await asyncio.sleep(config.drain_delay_s)
        lifecycle.refuse()
        if not await self._is_idle_within(config.drain_timeout_s):
            log.warning("the drain deadline ended requests", extra=with_fields(requests=lifecycle.num_requests))
            self._forwarder.end_all()
            await self._is_idle_within(FLUSH_S)
        lifecycle.stop()

    async def _is_idle_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lifecycle.until_idle(), timeout_s)
        return self._lifecycle.num_requests == 0

    async def _close(self, serving: asyncio.Task[None]) -> None:
        self._feeds.close()
        if self._watching is not None:
            self._watching.cancel()
        for pool in self._pools:
            pool.close()
        self._server.config.timeout_graceful_shutdown = int(FLUSH_S)
        self._server.should_exit = True
        with suppress(Exception):
            await serving

    def _take_signal(self, signum: int) -> None:
        if self._ended.is_set():
            log.warning("a second signal ends the process at once")
            remove_file(self._listener)
            os._exit(128 + signum)
        self._ended.set()
