"""Reranking for clients: prompts are made and counted first, paid for, and read a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarn.models.spec import Encoder
from kvarn.server.texts import ROOM, check_bounded

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.rerank import Judgement

DOCUMENT_ROOM = 64  # contexts: a cross-encoder reads a long document in parts
GROUP = 8  # documents between two looks whether the client is still there


async def judgements(llm: LLM, query: str, documents: Sequence[str]) -> list[Judgement]:
    """The documents in groups, made ready for a model; nothing is computed yet."""
    groups = [documents[start : start + GROUP] for start in range(0, len(documents), GROUP)]
    return [await asyncio.to_thread(_prepared, llm, query, group) for group in groups]


async def scores_of(groups: Sequence[Judgement], tenant: str) -> list[float]:
    """How well each document answers, group after group: a client that goes away stops the rest."""
    scores: list[float] = []
    for group in groups:
        scores += [float(score) for score in await asyncio.to_thread(group.scores, tenant)]
    return scores


def _prepared(llm: LLM, query: str, documents: Sequence[str]) -> Judgement:
    from kvarn.retrieval.rerank import prepare

    check_bounded(llm, [query], "query")
    room = DOCUMENT_ROOM if isinstance(llm.spec.generation, Encoder) else ROOM
    for text in documents:
        check_bounded(llm, [text], "documents", room=room)
    return prepare(llm, query, documents)
