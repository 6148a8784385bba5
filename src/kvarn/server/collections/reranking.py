"""Reranking over HTTP: prompts are made and counted, their tokens reserved by the caller, then scored in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarn.models.spec import Encoder
from kvarn.server.chat.prompt_limits import ROOM, check_bounded
from kvarn.server.process.worker_threads import work_for

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.search.rerank import Judgement
    from kvarn.server.access.keys import Principal
    from kvarn.server.process.worker_threads import TokenMeter, WorkerThreads
    from kvarn.server.request_context import RequestContext

DOCUMENT_ROOM = 64  # contexts: a cross-encoder reads a long document in parts
GROUP = 8  # documents scored between two checks whether the client is still connected


async def judgements(
    request: RequestContext, workers: WorkerThreads, llm: LLM, query: str, documents: Sequence[str]
) -> list[Judgement]:
    """The prompts of the documents, in groups; nothing is computed yet."""
    groups = [documents[start : start + GROUP] for start in range(0, len(documents), GROUP)]
    return [await work_for(request, workers, _prepared, llm, query, group) for group in groups]


async def num_tokens_of(request: RequestContext, workers: WorkerThreads, groups: Sequence[Judgement]) -> list[int]:
    """Tokens of each group."""
    return await work_for(request, workers, lambda: [group.num_tokens for group in groups])


async def scores_of(
    principal: Principal, meter: TokenMeter, groups: Sequence[Judgement], costs: Sequence[int]
) -> list[float]:
    """The score of each document, group after group: the groups after a disconnect are not computed."""
    tenant, priority = principal.tenant, principal.tier.priority
    scores: list[float] = []
    for group, cost in zip(groups, costs, strict=True):
        scores += map(float, await meter.run(cost, group.scores, tenant, priority))
    return scores


def _prepared(llm: LLM, query: str, documents: Sequence[str]) -> Judgement:
    from kvarn.retrieval.search.rerank import prepare

    check_bounded(llm, [query], "query")
    room = DOCUMENT_ROOM if isinstance(llm.spec.generation, Encoder) else ROOM
    for text in documents:
        check_bounded(llm, [text], "documents", room=room)
    return prepare(llm, query, documents)
