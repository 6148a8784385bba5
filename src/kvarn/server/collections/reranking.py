"""Reranking for clients: prompts are made and counted first, paid for, and read a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarn.models.spec import Encoder
from kvarn.server.chat.prompt_limits import ROOM, check_bounded

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.search.rerank import Judgement
    from kvarn.server.process.worker_threads import TokenMeter, WorkerThreads

DOCUMENT_ROOM = 64  # contexts: a cross-encoder reads a long document in parts
GROUP = 8  # documents between two looks whether the client is still there


async def judgements(workers: WorkerThreads, llm: LLM, query: str, documents: Sequence[str]) -> list[Judgement]:
    """The documents in groups, made ready for a model; nothing is computed yet."""
    groups = [documents[start : start + GROUP] for start in range(0, len(documents), GROUP)]
    return [await workers.run(_prepared, llm, query, group) for group in groups]


async def num_tokens_of(workers: WorkerThreads, groups: Sequence[Judgement]) -> list[int]:
    """Tokens of each group."""
    return await workers.run(lambda: [group.num_tokens for group in groups])


async def scores_of(
    spending: TokenMeter, groups: Sequence[Judgement], costs: Sequence[int], tenant: str
) -> list[float]:
    """How well each document answers, group after group: a client that goes away stops the rest."""
    scores: list[float] = []
    for group, cost in zip(groups, costs, strict=True):
        scores += map(float, await spending.run(cost, group.scores, tenant))
    return scores


def _prepared(llm: LLM, query: str, documents: Sequence[str]) -> Judgement:
    from kvarn.retrieval.search.rerank import prepare

    check_bounded(llm, [query], "query")
    room = DOCUMENT_ROOM if isinstance(llm.spec.generation, Encoder) else ROOM
    for text in documents:
        check_bounded(llm, [text], "documents", room=room)
    return prepare(llm, query, documents)
