"""The routes of an ingress: health and metrics of its own; everything else goes to the replicas of the model asked for.

A request names its model in its body; lists of models are joined from one replica of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvarn.errors import AuthError, ModelNotFound
from kvarn.observe.exposition import CONTENT_TYPE
from kvarn.routing.choice import bits
from kvarn.routing.feed import PATH as REPLICA_PATH
from kvarn.routing.fleet import Fleet, ReplicaState
from kvarn.server.access.auth import METRICS_PATH
from kvarn.server.failures import ReplicaLost
from kvarn.server.http.json_body import read_bytes
from kvarn.server.http.pipeline import PRINCIPAL
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.router.app import HEALTH_PATHS
from kvarn.server.router.exchange import Upstream, UpstreamFailed, UpstreamRequest, read_all
from kvarn.server.router.forwarding import HOP_HEADERS, Forwarder
from kvarn.server.router.metrics import RouterMetrics
from kvarn.server.router.routed_body import MODEL_PATH, asked_tag

LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}  # path -> the field that has one entry each
MAX_METRICS_BYTES = 16 << 20
TOLD_HEADERS = (b"content-type", b"www-authenticate")


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """The replicas of one model."""

    names: tuple[str, ...]  # of the model, and of its adapters
    fleet: Fleet
    forwarder: Forwarder
    seats: Sequence[Upstream]  # by their numbers in the fleet


class ModelRoutes:
    """ASGI, within the pipeline."""

    def __init__(
        self,
        groups: Sequence[ModelGroup],
        lifecycle: Lifecycle,
        metrics: RouterMetrics,
        *,
        max_body_bytes: int,
        has_open_metrics: bool,
    ) -> None:
        """groups: those of the first model answer what is about none."""
        self._groups = groups
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._has_open_metrics = has_open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in HEALTH_PATHS:
            await self._health(path)(scope, receive, send)
        elif path == METRICS_PATH:
            await self._own_metrics(scope)(scope, receive, send)
        elif path.startswith(METRICS_PATH + "/"):
            await (await self._engine_metrics(scope))(scope, receive, send)
        elif path.startswith(("/health", METRICS_PATH)) or path == REPLICA_PATH:
            raise HTTPException(404, "Not Found")
        else:
            data = await read_bytes(Request(scope, receive), self._max_body_bytes)
            if path in LISTS and len(self._groups) > 1 and scope["method"] == "GET":
                await (await self._joined(scope, receive, LISTS[path]))(scope, receive, send)
            else:
                await self._group(scope, data).forwarder.forward(scope, data, receive, send)

    def _group(self, scope: Scope, data: bytes) -> ModelGroup:
        """Who answers a request; ModelNotFound where it names a model that nobody has."""
        first = self._groups[0]
        if len(self._groups) == 1:
            return first
        path: str = scope["path"]
        if asked_tag(path) is not None:
            return next((one for one in self._groups if one.forwarder.knows(path)), first)
        name = path.removeprefix(MODEL_PATH) if path.startswith(MODEL_PATH) else _named_model(data)
        if name is None:
            return first
        for group in self._groups:
            if {name, name.removesuffix(":latest"), f"{name}:latest"} & {*group.names}:
                return group
        offered = ", ".join(one for group in self._groups for one in group.names)
        raise ModelNotFound(f"no model here is called {name[:80]!r}; this server has {offered}")

    async def _joined(self, scope: Scope, receive: Receive, field: str) -> Response:
        """One list of those of all models; what refuses it for one of them is the answer."""
        bodies: list[dict[str, Any]] = []
        for group in self._groups:
            answer = _Collected()
            await group.forwarder.forward(scope, b"", receive, answer)
            if answer.status != 200:
                return Response(answer.body, answer.status, media_type="application/json")
            bodies.append(json.loads(answer.body))
        joined = {**bodies[0], field: [one for body in bodies for one in body[field]]}
        if "last_id" in joined and joined[field]:
            joined |= {"first_id": joined[field][0]["id"], "last_id": joined[field][-1]["id"]}
        return JSONResponse(joined)

    async def _engine_metrics(self, scope: Scope) -> Response:
        """What one replica tells at its own /metrics, to whom it tells it: /metrics/MODEL/NUMBER."""
        name = scope["path"].removeprefix(METRICS_PATH + "/")
        seats = {one.name: seat for group in self._groups for one, seat in _seated(group)}
        if name not in seats:
            raise HTTPException(404, f"no replica is called {name[:80]!r}; there are {', '.join(seats) or 'none'}")
        headers = [one for one in scope["headers"] if one[0] not in HOP_HEADERS]
        exchange, _ = await seats[name].take()
        try:
            await exchange.begin(UpstreamRequest("GET", METRICS_PATH.encode(), headers, client=scope.get("client")))
            body = await read_all(exchange, MAX_METRICS_BYTES)
        except UpstreamFailed:
            raise ReplicaLost("the replica that was asked is gone; ask again") from None
        finally:
            seats[name].give_back(exchange)
        kept = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in exchange.headers if key in TOLD_HEADERS
        }
        return Response(body, exchange.status, kept)

    def _health(self, path: str) -> Response:
        """Alive as long as it answers; ready while it takes requests and a replica of every model can be asked."""
        counts = {group.names[0]: group.fleet.usable.bit_count() for group in self._groups}
        missing = next((name for name, count in counts.items() if not count), None)
        is_fine = {
            "/health/live": True,
            "/health/startup": self._lifecycle.is_started,
        }.get(path, self._lifecycle.is_ready and missing is None)
        why: str = "ok" if is_fine else self._lifecycle.phase
        if not is_fine and self._lifecycle.is_ready:
            why = f"no replica of {missing} can be asked"
        content = {"status": why, "phase": self._lifecycle.phase, "replicas": counts}
        return JSONResponse(content) if is_fine else JSONResponse(content, 503, {"retry-after": "1"})

    def _own_metrics(self, scope: Scope) -> Response:
        if scope[PRINCIPAL] is not None and not self._has_open_metrics:
            raise AuthError(
                "the ingress tells its metrics to its own machine only; deploy it with --open-metrics",
                reason="forbidden",
            )
        return Response(self._metrics.render(*(group.fleet for group in self._groups)), media_type=CONTENT_TYPE)


def _seated(group: ModelGroup) -> Iterator[tuple[ReplicaState, Upstream]]:
    """The replicas that may be asked, and the way to each."""
    for number in bits(group.fleet.usable):
        yield group.fleet.replicas[number], group.seats[number]


class _Collected:
    """send() of a response that is needed whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


def _named_model(data: bytes) -> str | None:
    """The model that a JSON body names; None: it names none, and its replica tells what is wrong with it."""
    try:
        body = json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None
