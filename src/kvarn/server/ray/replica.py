"""A replica on Ray: a whole server but for its sockets. What comes as a call passes the same application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvarn.errors import BackendError
from kvarn.observe.logs import configure_logging, with_fields
from kvarn.routing.choice import DECODE_TOKENS
from kvarn.routing.feed import total_load
from kvarn.server.app import make_app
from kvarn.server.process.interpreter import tune_for_serving
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.watchdog import Watchdog
from kvarn.server.ray.calls import CallHead, ReplicaCall
from kvarn.server.ray.membership import MembershipWatch
from kvarn.server.replica.engine_report import take_load
from kvarn.server.router.exchange import UpstreamRequest

log = logging.getLogger("kvarn.server.ray")
CLOSE_S = 2.0  # for each part to close its files


class ServerReplica:
    """One replica of one model's deployment. For the event loop that Ray Serve gives it."""

    async def __init__(self, config: ServerConfig, secret: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logging(config.log_level)
        self._folder = TemporaryDirectory(prefix="kvarn-")  # for this user alone
        key = Path(self._folder.name) / "cluster.key"
        key.write_bytes(secret)
        self._state = state = make_state(replace(config, engine=replace(config.engine, cluster_key=str(key))))
        self._app = make_app(state)
        models = state.models
        self._watchdog = Watchdog(
            lambda: [(one.id, one.llm.llm.client) for one in models.loaded], config.heartbeat_timeout_s
        )
        state.lifecycle.stuck_model = lambda: self._watchdog.stuck_model
        await state.limits.start()
        await models.start(state.lifecycle.begin_step)
        self._watchdog.start()
        tune_for_serving()
        state.lifecycle.become_ready()
        log.info("ready", extra=with_fields(models=list(models.ids)))

    async def answer(self, request: UpstreamRequest, *, replica: str) -> AsyncIterator[CallHead | bytes]:
        """Answer one request; replica: which one was asked, for the router."""
        assert replica, "the router names who is asked"
        async for part in ReplicaCall(request).answer(self._app):
            yield part

    async def meet(self, *, watch: MembershipWatch | None) -> None:
        """Called so that the router of the caller learns who watches it; nothing is done here."""
        assert watch is None, "it does not travel"

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray's controller scales by: see autoscaling.py."""
        clients = [model.llm.llm.client for model in self._state.models.loaded]
        load = total_load(await asyncio.gather(*(asyncio.wrap_future(one.call(take_load)) for one in clients)))
        tokens = load.prompt_tokens + DECODE_TOKENS * (load.running + load.waiting)
        return {"waiting": float(load.waiting), "tokens": float(tokens)}

    async def check_health(self) -> None:
        """Raise where an engine makes no progress or has ended: Ray replaces this replica."""
        lost = [one.id for one in self._state.models.loaded if not one.llm.llm.client.is_alive]
        if stuck := self._watchdog.stuck_model or next(iter(lost), None):
            raise BackendError(f"the engine of {stuck!r} makes no progress")

    async def __del__(self) -> None:
        """Ray calls it when no call runs any more."""
        if self._state.lifecycle.phase == "stopped":
            return
        self._watchdog.stop()
        self._state.lifecycle.stop()
        for part in self._state.closing_parts:
            with suppress(Exception):  # the process ends; each part on its own
                await asyncio.wait_for(part.close(), CLOSE_S)
        self._folder.cleanup()
