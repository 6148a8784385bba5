"""What a route may ask for as an argument: the request, and the parts of the server it uses.

    async def list_models(request: Called, models: Models) -> Response: ...

The only place that reads the application's state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request

from kvarn.errors import CapacityError, RateLimited
from kvarn.observe.metrics import Metrics
from kvarn.routing.feed import MARKS_HEADER
from kvarn.server.api.responses.response_store import ResponseStore
from kvarn.server.batches.jobs import BatchJobs
from kvarn.server.chat.generation import Generations
from kvarn.server.collections.chat_retrieval import RetrievalServices
from kvarn.server.collections.collection_pool import CollectionPool
from kvarn.server.http.pipeline import PRINCIPAL
from kvarn.server.http.traffic import Traffic
from kvarn.server.live.sampler import LiveSampler
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.no_room import NoRoomForModel
from kvarn.server.models.pulls import Pulls
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.worker_threads import WorkerThreads
from kvarn.server.replica.publisher import ReplicaPublisher
from kvarn.server.request_context import RequestContext
from kvarn.server.state import ServerState


class Overloaded(CapacityError):
    """No room now, for one request: several may wait for the same, and each key has limits of its own."""

    def __init__(self, error: CapacityError, headers: Mapping[str, str]) -> None:
        super().__init__(str(error), retry_after_s=error.retry_after_s)
        self.headers = headers


def request_context(http: Request) -> RequestContext:
    """The context of a request that passed the pipeline."""
    state = _state(http)
    request = RequestContext(
        http, state.config, state.lifecycle, threads=state.request_threads, body_thread=state.body_thread
    )
    if state.replica.is_member and (marks := http.headers.get(MARKS_HEADER)) is not None:
        request.prefix_marks = state.replica.marks(marks.encode("latin-1"))
    return request


async def _called(http: Request) -> AsyncIterator[RequestContext]:
    async with request_context(http) as request:
        try:
            yield request
        except CapacityError as error:
            raise _refused(error, request, _state(http)) from error


async def charged(http: Request) -> AsyncIterator[RequestContext]:
    """Before the body is read or a model loaded: a client beyond its limits must not cost the others even that."""
    async with request_context(http) as request:
        try:
            request.charge(await _state(http).limits.enter(request.principal))
            yield request
        except CapacityError as error:
            raise _refused(error, request, _state(http)) from error


def _refused(error: CapacityError, request: RequestContext, state: ServerState) -> CapacityError:
    """The refusal with what is left of the key's limits; one before anything was computed counts for nothing."""
    request.withdraw_unused()
    if isinstance(error, NoRoomForModel):
        error.retry_after(state.generations.left_s)
        state.metrics.request_refused(request.principal.tier.name, "memory")
    headers = state.limits.headers(request.principal)
    if isinstance(error, RateLimited):
        error.headers = headers
    return Overloaded(error, headers) if type(error) in (CapacityError, NoRoomForModel) else error


def _state(http: Request) -> ServerState:
    state: ServerState = http.app.state.kvarn
    return state


def _retrieval(state: ServerState) -> RetrievalServices:
    return RetrievalServices(
        models=state.models,
        collections=state.collections,
        workers=state.workers,
        document_reader=state.document_reader,
        storage=state.storage,
        prefix_warmup=state.prefix_warmup,
        metrics=state.metrics,
    )


async def _is_known(http: Request) -> bool:
    return http.scope[PRINCIPAL] is not None


class ServerPart:
    """A part of the server, as a route takes it."""

    def __init__(self, get: Callable[[ServerState], Any]) -> None:
        self.get = get

    async def __call__(self, http: Request) -> Any:
        return self.get(_state(http))


def _part(get: Callable[[ServerState], Any]) -> Any:
    return Depends(ServerPart(get))


Called = Annotated[RequestContext, Depends(_called)]  # looks at something
Charged = Annotated[RequestContext, Depends(charged)]  # computes: counts as a request of the key from the start

IsKnown = Annotated[
    bool, Depends(_is_known)
]  # on a path that needs no key: whether the caller has one, or none is needed

Models = Annotated[ModelPool, _part(lambda state: state.models)]
ModelPulls = Annotated[Pulls, _part(lambda state: state.pulls)]
RunningGenerations = Annotated[Generations, _part(lambda state: state.generations)]
Settings = Annotated[ServerConfig, _part(lambda state: state.config)]
ServerMetrics = Annotated[Metrics, _part(lambda state: state.metrics)]
ServerLifecycle = Annotated[Lifecycle, _part(lambda state: state.lifecycle)]
HttpTraffic = Annotated[Traffic, _part(lambda state: state.traffic)]
Collections = Annotated[CollectionPool, _part(lambda state: state.collections)]
Workers = Annotated[WorkerThreads, _part(lambda state: state.workers)]
Live = Annotated[LiveSampler, _part(lambda state: state.live)]
Responses = Annotated[ResponseStore, _part(lambda state: state.responses)]
Retrieval = Annotated[RetrievalServices, _part(_retrieval)]
Replica = Annotated[ReplicaPublisher, _part(lambda state: state.replica)]
Batches = Annotated[BatchJobs, _part(lambda state: state.batches)]
