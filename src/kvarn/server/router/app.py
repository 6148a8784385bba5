"""The application of a router: its own health and metrics, and everything else through the forwarder.

The pipeline around it is a server's: host and path are checked, phases of life decide, failures become bodies.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvarn.errors import AuthError
from kvarn.observe.exposition import CONTENT_TYPE
from kvarn.routing.feed import PATH as REPLICA_PATH
from kvarn.routing.fleet import Fleet
from kvarn.server.access.auth import METRICS_PATH, Authenticator
from kvarn.server.access.keys import KeyRing
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.pipeline import PRINCIPAL, RequestPipeline
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.settings import ServerConfig
from kvarn.server.router.forwarding import Forwarder
from kvarn.server.router.metrics import RouterMetrics

HEALTH_PATHS = ("/health", "/health/ready", "/health/live", "/health/startup")


@dataclass(frozen=True, slots=True)
class RouterState:
    """The parts of one router."""

    config: ServerConfig
    lifecycle: Lifecycle
    traffic: Traffic
    fleet: Fleet
    forwarder: Forwarder
    metrics: RouterMetrics
    has_open_metrics: bool  # other machines may read them


def make_router_app(state: RouterState) -> ASGIApp:
    """The ASGI application of one router; replicas know the API keys, it knows none."""
    return RequestPipeline(
        RouterRoutes(state),
        browsers=BrowserPolicy(state.config),
        auth=Authenticator(KeyRing(None), takes_local=state.config.takes_local),
        lifecycle=state.lifecycle,
        traffic=state.traffic,
    )


class RouterRoutes:
    """ASGI, within the pipeline."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in HEALTH_PATHS:
            await self._health(path)(scope, receive, send)
        elif path == METRICS_PATH:
            await self._metrics(scope)(scope, receive, send)
        elif path.startswith(("/health", METRICS_PATH)) or path == REPLICA_PATH:
            raise HTTPException(404, "Not Found")
        else:
            await self._state.forwarder(scope, receive, send)

    def _health(self, path: str) -> Response:
        """Alive as long as it answers; ready while it takes requests and a replica can be asked."""
        lifecycle, fleet = self._state.lifecycle, self._state.fleet
        num_usable = fleet.usable.bit_count()
        is_fine = {
            "/health/live": True,
            "/health/startup": lifecycle.is_started,
        }.get(path, lifecycle.is_ready and num_usable > 0)
        why = "ok" if is_fine else "no replica can be asked" if lifecycle.is_ready else lifecycle.phase
        counts = {"usable": num_usable, "total": sum(one.address is not None for one in fleet.replicas)}
        content = {"status": why, "phase": lifecycle.phase, "replicas": counts}
        return JSONResponse(content) if is_fine else JSONResponse(content, 503, {"retry-after": "1"})

    def _metrics(self, scope: Scope) -> Response:
        if scope[PRINCIPAL] is not None and not self._state.has_open_metrics:
            raise AuthError(
                "the router tells its metrics to this machine only; start it with --open-metrics", reason="forbidden"
            )
        return Response(self._state.metrics.render(self._state.fleet), media_type=CONTENT_TYPE)
