"""Reranking over HTTP: prompts are made and counted, their tokens reserved by the caller, then scored in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarn.models.spec import Encoder
from kvarn.server.api.schema import item_at_fault
from kvarn.server.chat.prompt_limits import ROOM, check_bounded
from kvarn.server.collections.ingestion import num_bytes_of
from kvarn.server.process.worker_threads import work_for

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.reranking.rank import RerankBatch
    from kvarn.server.access.keys import Principal
    from kvarn.server.process.worker_threads import TokenMeter, WorkerThreads
    from kvarn.server.request_context import RequestContext

DOCUMENT_ROOM = 64  # contexts: a cross-encoder reads a long document in parts
BATCH = 8  # documents scored between two checks whether the client is still connected


def num_bytes_read(query: str, documents: Sequence[str]) -> int:
    """Bytes of all prompts: the query is in each of them."""
    return len(documents) * num_bytes_of(query) + sum(map(num_bytes_of, documents))


async def rerank_batches(
    request: RequestContext, workers: WorkerThreads, llm: LLM, query: str, documents: Sequence[str]
) -> list[RerankBatch]:
    """The prompts of the documents, in batches; nothing is computed yet."""
    await work_for(request, workers, check_bounded, llm, [query], "query", room=1)
    starts = range(0, len(documents), BATCH)
    return [
        await work_for(request, workers, _prepared, llm, query, documents[start : start + BATCH], start)
        for start in starts
    ]


async def num_tokens_of(request: RequestContext, workers: WorkerThreads, batches: Sequence[RerankBatch]) -> list[int]:
    """Tokens of each batch."""
    return await work_for(request, workers, lambda: [batch.num_tokens for batch in batches])


async def scores_of(
    principal: Principal, meter: TokenMeter, batches: Sequence[RerankBatch], costs: Sequence[int]
) -> list[float]:
    """The score of each document, batch after batch: the batches after a disconnect are not computed."""
    tenant, priority = principal.tenant, principal.tier.priority
    scores: list[float] = []
    for batch, cost in zip(batches, costs, strict=True):
        scores += map(float, await meter.run(cost, batch.scores, tenant, priority))
    return scores


def _prepared(llm: LLM, query: str, documents: Sequence[str], start: int) -> RerankBatch:
    """start: the number of the first one in the request."""
    from kvarn.reranking.rank import ChatBatch, prepare

    room = DOCUMENT_ROOM if isinstance(llm.spec.generation, Encoder) else ROOM
    for number, text in enumerate(documents, start):
        check_bounded(llm, [text], f"documents.{number}", room=room)
    batch = prepare(llm, query, documents)
    if isinstance(batch, ChatBatch):
        for number, prompt in enumerate(batch.prompts, start):
            with item_at_fault(f"documents.{number}"):
                llm.admission.check_length(len(prompt), llm.context - 1)
    return batch
