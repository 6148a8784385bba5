"""GET /metrics: what happened here, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.engine.engine import Engine
from kvarn.engine.stats import EngineStats
from kvarn.errors import KvarnError
from kvarn.observe.exposition import CONTENT_TYPE
from kvarn.server.models.model_pool import ServedModel
from kvarn.server.state import ServerState

log = logging.getLogger("kvarn.server")
router = APIRouter()

LOOK_TIMEOUT_S = 0.5  # a step that takes longer is not waited for: the figures are then those of the last look


@router.get("/metrics", tags=["operations"], summary="Metrics in the Prometheus text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms, each from 0 at the start of the process."""
    state: ServerState = request.app.state.kvarn
    served = state.shelf.loaded
    await asyncio.gather(*(_look_at(state, one) for one in served))
    state.metrics.update_collections(state.collections.num_open, *state.collections.hot_counts)
    state.metrics.update_http(state.lifecycle.num_requests, state.traffic)
    state.metrics.remove_unloaded(one.id for one in served)
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


async def _look_at(state: ServerState, served: ServedModel) -> None:
    """Ask an engine between two of its steps, without waiting long."""
    llm = served.llm.llm
    grammars = llm.submissions.constraints
    state.metrics.update_grammars(served.id, grammars.compile_times, grammars.num_reused)
    asked: Future[EngineStats] = llm.client.call(_stats)
    try:
        figures = await asyncio.wait_for(asyncio.wrap_future(asked), LOOK_TIMEOUT_S)
    except (TimeoutError, KvarnError) as error:
        log.warning("the engine of %s gave no figures: %s", served.id, type(error).__name__)
        return
    plan = llm.memory
    parts = {
        "weights": plan.weights_bytes,
        "kv": plan.kv_bytes,
        "scratch": plan.scratch_bytes,
        "runtime": plan.runtime_bytes,
    }
    state.metrics.update_engine(served.id, figures, parts)


def _stats(engine: Engine) -> EngineStats:
    return engine.stats()
