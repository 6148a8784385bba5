"""The ingress: Kvarn's own sockets on a node, the router behind them, and the replicas of every model as calls of Ray.

    client ──socket, limits, deadlines──> pipeline ──> ModelRoutes ──> Forwarder ──call──> ServerReplica

Ray's own proxy stays out of the way: what guards a server's connections guards these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from kvarn.errors import BackendError
from kvarn.observe.logs import configure_logging, with_fields
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.fleet import Fleet
from kvarn.server.access.auth import Authenticator
from kvarn.server.access.keys import KeyRing
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.pipeline import RequestPipeline
from kvarn.server.http.traffic import Traffic
from kvarn.server.models.adapters import named_path
from kvarn.server.process.http_server import make_http_server
from kvarn.server.process.interpreter import tune_for_serving
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.listening import listening, shown_address
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.tls import Certificate
from kvarn.server.ray.membership import MembershipWatch, ReplicaSeats
from kvarn.server.ray.model_routes import ModelGroup, ModelRoutes
from kvarn.server.ray.settings import RayConfig
from kvarn.server.router.feeds import ReplicaFeeds
from kvarn.server.router.forwarding import Forwarder
from kvarn.server.router.metrics import RouterMetrics

log = logging.getLogger("kvarn.router")
WATCH_S = 5.0  # between two calls that tell Ray's router who watches it, should it have been made anew
FLUSH_S = 3.0  # for answers to send their final bytes after the deadline


@dataclass(frozen=True, slots=True)
class HttpSide:
    """What connections need of this ingress."""

    config: ServerConfig
    lifecycle: Lifecycle
    traffic: Traffic


class Ingress:
    """One per node. For the event loop that Ray Serve gives it."""

    async def __init__(self, config: RayConfig, secret: bytes, handles: Sequence[Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """handles: of the deployments of config.models."""
        configure_logging(config.server.log_level)
        self._http = HttpSide(config.server, Lifecycle(), Traffic())
        self._tasks: list[asyncio.Task[Any]] = []
        self._feeds: list[ReplicaFeeds] = []
        self._groups: list[ModelGroup] = []
        self._serving: asyncio.Task[None] | None = None
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(listening(config.server))
        key = ClusterKey(secret)
        self._metrics: RouterMetrics | None = None  # of all groups in one store
        for model, handle in zip(config.models, handles, strict=True):
            self._add_group(config, key, model, handle)
        self._listen(config)
        log.info("ready", extra=with_fields(address=self.shown, models=[one.names[0] for one in self._groups]))

    @property
    def shown(self) -> str:
        return shown_address(self._listener, self._http.config)

    async def address(self) -> str:
        """Where clients find this ingress, once every model can be asked."""
        while any(not group.fleet.usable for group in self._groups):
            await asyncio.sleep(0.05)
        return self.shown

    async def check_health(self) -> None:
        """Raise where the sockets are gone: Ray starts another ingress."""
        if self._serving is None or self._serving.done():
            raise BackendError("the HTTP server ended by itself")

    async def drain(self) -> None:
        """As a server does: accept for the delay, refuse, wait for what runs, end it at the deadline."""
        config, lifecycle = self._http.config, self._http.lifecycle
        if lifecycle.phase != "ready":
            return
        lifecycle.drain()
        log.info("draining", extra=with_fields(requests=lifecycle.num_requests, delay_s=config.drain_delay_s))
        await asyncio.sleep(config.drain_delay_s)
        lifecycle.refuse()
        if not await self._is_idle_within(config.drain_timeout_s):
            log.warning("the drain deadline ended requests", extra=with_fields(requests=lifecycle.num_requests))
            for group in self._groups:
                group.forwarder.end_all()
            await self._is_idle_within(FLUSH_S)
        lifecycle.stop()

    async def __del__(self) -> None:
        """Ray calls it when this ingress is to end."""
        if self._http.lifecycle.phase == "stopped" and self._serving is None:
            return
        await self.drain()
        for feeds in self._feeds:
            feeds.close()
        for task in self._tasks:
            task.cancel()
        self._server.config.timeout_graceful_shutdown = int(FLUSH_S)
        self._server.should_exit = True
        serving, self._serving = self._serving, None
        if serving is not None:
            with suppress(Exception):
                await serving
        self._stack.close()

    def _add_group(self, config: RayConfig, key: ClusterKey, model: tuple[str, ServerConfig], handle: Any) -> None:
        """The replicas of one model: who they are, what they hold, and the way to them."""
        model_id, server = model
        seats = ReplicaSeats(handle.options(stream=True), 2 * config.scale.max_replicas + 2)
        numbered = [f"{model_id}/{number}" for number in range(len(seats.seats))]
        fleet, metrics = Fleet(numbered, config.policy), RouterMetrics(numbered, self._metrics)
        forwarder = Forwarder(fleet, seats.seats, key, config.server, metrics)
        feeds = ReplicaFeeds(fleet, seats.seats, key, lambda number: seats.seats[number].give_up_unanswered())
        feeds.start()
        self._feeds.append(feeds)
        adapters = [named_path(given)[0] for given in server.loras]
        self._groups.append(ModelGroup((model_id, *adapters), fleet, forwarder, seats.seats))
        self._tasks.append(asyncio.create_task(_keep_watch(handle, seats)))
        self._metrics = self._metrics or metrics

    def _listen(self, config: RayConfig) -> None:
        lifecycle, server = self._http.lifecycle, config.server
        assert self._metrics is not None, "there is a model"
        routes = ModelRoutes(
            self._groups,
            lifecycle,
            self._metrics,
            max_body_bytes=server.max_body_bytes,
            has_open_metrics=config.has_open_metrics,
        )
        app = RequestPipeline(
            routes,
            browsers=BrowserPolicy(server),
            auth=Authenticator(KeyRing(None), takes_local=server.takes_local),
            lifecycle=lifecycle,
            traffic=self._http.traffic,
        )
        certificate = None if server.tls_cert is None else Certificate(server)
        self._server = make_http_server(self._http, app, self._listener, certificate)
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        tune_for_serving()
        lifecycle.become_ready()

    async def _is_idle_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._http.lifecycle.until_idle(), timeout_s)
        return self._http.lifecycle.num_requests == 0


async def _keep_watch(handle: Any, seats: ReplicaSeats) -> None:
    """Be told who runs. The first call waits for the first replica."""
    watch = MembershipWatch(asyncio.get_running_loop(), seats.update)
    while True:
        try:
            await handle.meet.remote(watch=watch)
        except Exception as error:  # a replica that ended meanwhile; Ray's router has the watch
            log.warning("a replica was not met: %s", type(error).__name__)
        await asyncio.sleep(WATCH_S)
