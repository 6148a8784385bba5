"""POST /api/embed, and /api/embeddings as older clients ask: vectors by the way of /v1/embeddings."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.observe.metrics import Metrics
from kvarn.server.api.ollama.answer_schema import EmbedAnswer, OlderEmbeddingsAnswer
from kvarn.server.api.ollama.errors import PREFIX
from kvarn.server.api.ollama.schema import EmbedBody, OlderEmbeddingsBody
from kvarn.server.api.ollama.translation import model_id
from kvarn.server.api.openai.embeddings_routes import embedded, encoded_inputs
from kvarn.server.api.openai.embeddings_schema import EmbeddingsBody
from kvarn.server.api.schema import body_of
from kvarn.server.api.validation import parse
from kvarn.server.dependencies import Charged, Models, ServerMetrics
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["ollama"])


@router.post(f"{PREFIX}embed", response_model=EmbedAnswer, openapi_extra=body_of(EmbedBody))
async def embed(request: Charged, models: Models, metrics: ServerMetrics) -> Response:
    """Turn texts into vectors of length one."""
    body = await request.body(EmbedBody)
    vectors, num_tokens, load_s = await _embedded(request, models, metrics, body)
    fields = {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": round((time.monotonic() - request.received_at) * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": num_tokens,
    }
    return await request.reply_from_thread(lambda: fields)


@router.post(f"{PREFIX}embeddings", response_model=OlderEmbeddingsAnswer, openapi_extra=body_of(OlderEmbeddingsBody))
async def older_embeddings(request: Charged, models: Models, metrics: ServerMetrics) -> Response:
    """Turn one text into a vector."""
    body = await request.body(OlderEmbeddingsBody)
    vectors, _, _ = await _embedded(
        request, models, metrics, parse(EmbedBody, {"model": body.model, "input": body.prompt})
    )
    return request.reply({"embedding": vectors[0] if vectors else []})


async def _embedded(
    request: RequestContext, models: ModelPool, metrics: Metrics, body: EmbedBody
) -> tuple[list[list[float]], int, float]:
    """Vectors, tokens, and how long the model took to load."""
    began_at = time.monotonic()
    model = await request.use_model(models, model_id(body.model, models.ids))
    load_s = time.monotonic() - began_at
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not any(texts):
        return [], 0, load_s
    wanted = parse(EmbeddingsBody, {"model": model.id, "input": texts, "dimensions": body.dimensions})
    ids = await request.in_thread(lambda: encoded_inputs(request, model.llm.llm, wanted))
    num_tokens = sum(map(len, ids))
    await request.reserve(num_tokens)
    vectors = await embedded(request, model, metrics, wanted, ids)
    metrics.embedded(model.id, num_tokens, time.monotonic() - request.received_at)
    return vectors.tolist(), num_tokens, load_s
