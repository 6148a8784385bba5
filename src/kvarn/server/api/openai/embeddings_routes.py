"""POST /v1/embeddings: one vector for each input, computed a few at a time so that other requests are not held up."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from kvarn.errors import BackendError, DeadlineExceeded
from kvarn.server.api.openai.embeddings_schema import EmbeddingsAnswer, EmbeddingsBody
from kvarn.server.api.schema import InvalidField, body_of, item_at_fault
from kvarn.server.api.text_inputs import name_of_item
from kvarn.server.chat.prompt_limits import encode_bounded
from kvarn.server.dependencies import Charged, Models, ServerMetrics
from kvarn.server.failures import ClientGone
from kvarn.server.http.json_body import json_response
from kvarn.server.process.lifecycle import ShuttingDown
from kvarn.types import Usage
from kvarn.vectors import Float32

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.observe.metrics import Metrics
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["embeddings"])
BATCH_TOKENS = 2048  # charged when they are done; the engine cuts them smaller
Ids = Sequence[Sequence[int]]


@router.post("/v1/embeddings", response_model=EmbeddingsAnswer, openapi_extra=body_of(EmbeddingsBody))
async def embed(request: Charged, models: Models, metrics: ServerMetrics) -> Response:
    """Turn texts or token ids into vectors. For encoder models such as minilm."""
    body = await request.body(EmbeddingsBody)
    model = await request.use_model(models, body.model)
    ids = await request.in_thread(lambda: encoded_inputs(request, model.llm.llm, body))
    num_tokens = sum(map(len, ids))
    await request.reserve(num_tokens)
    vectors = await embedded(request, model, metrics, body, ids)
    metrics.embedded(model.id, num_tokens, time.monotonic() - request.received_at)
    content = await request.in_thread(lambda: _written(vectors, body, num_tokens))
    return json_response(content, request.headers)


def encoded_inputs(request: RequestContext, llm: LLM, body: EmbeddingsBody) -> Ids:
    """Runs in a worker thread: token ids of every input, all of them within the model's bounds."""
    llm.vectors.pooling(body.pooling)
    prompt = llm.vectors.prompts.text(body.prompt_name)
    width = llm.vectors.width
    if body.dimensions is not None and body.dimensions > width:
        raise InvalidField(
            f"dimensions is {body.dimensions:,}, the model's vectors have {width:,}; give at most that many",
            "dimensions",
        )
    inputs: Sequence[str | list[int]] = [prompt + one if isinstance(one, str) else one for one in body.input]
    names = [name_of_item("input", index, len(inputs)) for index in range(len(inputs))]
    return [_encoded(llm, *one) for one in request.while_wanted(zip(inputs, names, strict=True))]


def _encoded(llm: LLM, one: str | list[int], name: str) -> list[int]:
    with item_at_fault(name):
        ids = encode_bounded(llm, one, name) if isinstance(one, str) else one
        llm.admission.check_length(len(ids), llm.context)
        llm.admission.check_tokens("input", ids)
    return ids


async def embedded(
    request: RequestContext, model: ServedModel, metrics: Metrics, body: EmbeddingsBody, ids: Ids
) -> Float32:
    """Vectors of the length asked for; only what was computed is charged, also when the client disconnects."""
    num_used = 0
    vectors = []
    try:
        for batch in _batches(ids):
            work = model.llm.embed(batch, body.pooling, normalize=False, priority=request.principal.tier.priority)
            vectors.append(await request.while_awaited(work))
            num_used += sum(map(len, batch))
    except BackendError as error:
        metrics.request_failed(model.id, error)
        raise
    except (ClientGone, DeadlineExceeded, ShuttingDown):
        metrics.request_abandoned(model.id, Usage(num_used, 0), "prefill")
        raise
    finally:
        request.use(num_used)
    wanted = np.concatenate(vectors)[:, : body.dimensions]
    return _normalized(wanted) if body.normalize else wanted


def _batches(ids: Ids) -> Iterator[Ids]:
    batch: list[Sequence[int]] = []
    num_tokens = 0
    for one in ids:
        if batch and num_tokens + len(one) > BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(one)
        num_tokens += len(one)
    yield batch


def _normalized(vectors: Float32) -> Float32:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def _written(vectors: Float32, body: EmbeddingsBody, num_tokens: int) -> bytes:
    """Runs in a worker thread, vector by vector: one dump of them all would block all threads for a second."""
    usage = json.dumps({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
    written = (_one(index, vector, body.encoding_format) for index, vector in enumerate(vectors))
    head = f'{{"object":"list","model":{json.dumps(body.model)},"usage":{usage},"data":['
    return (head + ",".join(written) + "]}").encode()


def _one(index: int, vector: Float32, encoding: str) -> str:
    is_text = encoding == "base64"
    embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
    return json.dumps({"object": "embedding", "index": index, "embedding": embedding}, separators=(",", ":"))
