"""GET /metrics: what happened here, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.engine.engine import Engine
from kvarn.engine.stats import EngineStats
from kvarn.errors import KvarnError
from kvarn.observe.exposition import CONTENT_TYPE
from kvarn.observe.metrics import Metrics
from kvarn.server.dependencies import Collections, HttpTraffic, Models, ServerLifecycle, ServerMetrics
from kvarn.server.models.served_model import ServedModel

log = logging.getLogger("kvarn.server")
router = APIRouter()

COLLECT_TIMEOUT_S = 0.5  # a step that takes longer is not waited for: the figures are then those collected last


@router.get("/metrics", tags=["operations"], summary="Metrics in the Prometheus text format", response_class=Response)
async def metrics(
    metrics: ServerMetrics,
    models: Models,
    collections: Collections,
    lifecycle: ServerLifecycle,
    traffic: HttpTraffic,
) -> Response:
    """Counters, gauges and histograms, each from 0 at the start of the process."""
    loaded = models.loaded
    await asyncio.gather(*(_collect(metrics, model) for model in loaded))
    metrics.update_collections(collections.num_open, *collections.query_cache_counts)
    metrics.update_http(lifecycle.num_requests, traffic)
    metrics.remove_unloaded(model.id for model in loaded)
    return Response(metrics.render(), media_type=CONTENT_TYPE)


async def _collect(metrics: Metrics, model: ServedModel) -> None:
    """Ask an engine between two of its steps, without waiting long."""
    llm = model.llm.llm
    grammars = llm.submissions.constraints
    metrics.update_grammars(model.id, grammars.compile_times, grammars.num_reused)
    asked: Future[EngineStats] = llm.client.call(Engine.stats)
    try:
        figures = await asyncio.wait_for(asyncio.wrap_future(asked), COLLECT_TIMEOUT_S)
    except (TimeoutError, KvarnError) as error:
        log.warning("the engine of %s gave no figures: %s", model.id, type(error).__name__)
        return
    plan = llm.memory
    parts = {
        "weights": plan.weights_bytes,
        "kv": plan.kv_bytes,
        "states": plan.state_bytes,
        "scratch": plan.scratch_bytes,
        "runtime": plan.runtime_bytes,
    }
    metrics.update_engine(model.id, figures, parts)
