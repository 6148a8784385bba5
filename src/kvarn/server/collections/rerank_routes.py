"""POST /rerank, also as /v1/rerank and /v2/rerank: documents in the order in which they answer a query."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.schema import body_of
from kvarn.server.collections.rerank_schema import RerankAnswer, RerankBody
from kvarn.server.collections.reranking import num_bytes_read, num_tokens_of, rerank_batches, scores_of
from kvarn.server.dependencies import Charged, Models, ServerMetrics, Workers
from kvarn.server.process.worker_threads import TokenMeter

router = APIRouter(tags=["rerank"])


@router.post("/rerank", response_model=RerankAnswer, openapi_extra=body_of(RerankBody))
@router.post("/v1/rerank", response_model=RerankAnswer, openapi_extra=body_of(RerankBody), include_in_schema=False)
@router.post("/v2/rerank", response_model=RerankAnswer, openapi_extra=body_of(RerankBody), include_in_schema=False)
async def rerank(request: Charged, models: Models, workers: Workers, metrics: ServerMetrics) -> Response:
    """Order documents by how well they answer a query. For cross-encoders, and for models that chat."""
    body = await request.body(RerankBody)
    model = await request.use_model(models, body.model)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    await request.expect(await request.on_body(lambda: num_bytes_read(body.query, documents)))
    batches = await rerank_batches(request, workers, model.llm.llm, body.query, documents)
    costs = await num_tokens_of(request, workers, batches)
    num_tokens = sum(costs)
    await request.reserve(num_tokens)
    meter = TokenMeter(request, workers)
    try:
        scores = await request.while_awaited(scores_of(request.principal, meter, batches, costs))
    finally:
        request.use(meter.num_tokens)
    metrics.embedded(model.id, num_tokens, time.monotonic() - request.received_at)
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))[: body.top_n]
    results = [_result(index, scores[index], documents[index] if body.return_documents else None) for index in order]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"id": f"rerank-{request.id}", "model": model.id, "results": results, "usage": usage}
    return await request.reply_from_thread(lambda: answer)


def _result(index: int, score: float, document: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": index, "relevance_score": score}
    return fields if document is None else {**fields, "document": {"text": document}}
