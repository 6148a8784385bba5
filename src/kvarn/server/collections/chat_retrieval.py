"""Chats that look things up: from the retrieval field of a body to messages with sources and cited answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvarn.server.collections.reranking import judgements, num_tokens_of, scores_of
from kvarn.server.http.disconnect import while_awaited
from kvarn.server.process.worker_threads import work_for

if TYPE_CHECKING:
    from kvarn.observe.metrics import Metrics
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import Hit, Tuning
    from kvarn.server.api.openai.chat_schema import ChatBody
    from kvarn.server.api.openai.envelope import Envelope
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.collections.collection_pool import CollectionPool
    from kvarn.server.collections.prefix_warmup import HotChat, PrefixWarmup
    from kvarn.server.collections.schema import HowBody, RetrievalBody, SearchBody
    from kvarn.server.models.model_pool import ModelPool, ServedModel
    from kvarn.server.process.worker_threads import TokenMeter, WorkerThreads
    from kvarn.server.request_context import RequestContext
    from kvarn.server.state import ServerState
    from kvarn.types import Citation, Grounded


@dataclass(frozen=True, slots=True)
class RetrievalServices:
    """The parts of the server that retrieval uses."""

    models: ModelPool
    collections: CollectionPool
    workers: WorkerThreads
    prefix_warmup: PrefixWarmup
    metrics: Metrics

    @staticmethod
    def of(state: ServerState) -> RetrievalServices:
        return RetrievalServices(state.models, state.collections, state.workers, state.prefix_warmup, state.metrics)


@asynccontextmanager
async def using(request: RequestContext, collections: CollectionPool, name: str) -> AsyncIterator[Collection]:
    """Keep one of the caller's collections open while the block runs; waits only as long as the caller does."""
    async with AsyncExitStack() as held:
        opening = held.enter_async_context(collections.use(request.principal.tenant, name))
        yield await while_awaited(request, opening)


async def ground(
    request: RequestContext, services: RetrievalServices, served: ServedModel, chat: Conversation, body: ChatBody
) -> Grounded:
    """Look up what a conversation asks in one of the caller's collections, and put it into the messages."""
    wanted = body.retrieval
    assert wanted is not None
    async with using(request, services.collections, wanted.collection) as collection:
        await request.use_model(services.models, collection.embedder.name)
        options = grounding_options(wanted)
        started = time.monotonic()
        grounded = await work_for(
            request,
            services.workers,
            lambda: served.llm.llm.ground(chat.messages, collection.grounding(**options)),
        )
        services.metrics.searched(wanted.mode, time.monotonic() - started)
        hot = _hot_chat(request, served, chat, body, collection)
        if hot is not None:
            services.prefix_warmup.remember(hot, collection.version)
    return grounded


async def reranked(
    request: RequestContext,
    services: RetrievalServices,
    body: SearchBody,
    found: Sequence[tuple[str, Sequence[Hit]]],
    spending: TokenMeter,
) -> list[list[Hit]]:
    """The best hits of each query, as a model orders them that reads them; what it reads is paid for before."""
    from kvarn.retrieval.search.rerank import best_hits

    assert body.rerank is not None
    served = await request.use_model(services.models, body.rerank)
    texts = [(query, [hit.text for hit in hits]) for query, hits in found]
    workers, tenant = services.workers, request.principal.tenant
    groups = [await while_awaited(request, judgements(workers, served.llm.llm, *one)) for one in texts]
    costs = [await while_awaited(request, num_tokens_of(workers, one)) for one in groups]
    num_tokens = sum(map(sum, costs))
    request.reserve(num_tokens)
    scores = [
        await while_awaited(request, scores_of(spending, one, cost, tenant))
        for one, cost in zip(groups, costs, strict=True)
    ]
    services.metrics.embedded(served.id, num_tokens, time.monotonic() - request.received_at)
    return [best_hits(hits, one, body.k) for (_, hits), one in zip(found, scores, strict=True)]


def _hot_chat(
    request: RequestContext, served: ServedModel, chat: Conversation, body: ChatBody, collection: Collection
) -> HotChat | None:
    """What to warm up from now on, if the question is a hot one; later turns of a conversation do not come again."""
    from kvarn.retrieval.search.rag_prompt import last_question
    from kvarn.server.collections.prefix_warmup import HotChat

    wanted = body.retrieval
    assert wanted is not None
    if chat.tools or any(message["role"] == "assistant" for message in chat.messages):
        return None
    query = wanted.query or last_question(chat.messages)
    question = collection.hot_question(query, wanted.k, wanted.mode, wanted.filter, tuning_of(wanted))
    if question is None:
        return None
    options, salt = grounding_options(wanted), body.cache_salt or ""
    return HotChat(request.principal, salt, served.id, wanted.collection, question, chat, options)


def with_messages(chat: Conversation, grounded: Grounded) -> Conversation:
    """The conversation as the model reads it."""
    return replace(chat, messages=tuple(dict(message) for message in grounded.messages))


def grounding_options(wanted: RetrievalBody) -> dict[str, Any]:
    """The fields of a body as Collection.grounding takes them."""
    return {
        "k": wanted.k,
        "mode": wanted.mode,
        "filter": wanted.filter,
        "budget": wanted.max_context_tokens,
        "query": wanted.query,
        "tuning": tuning_of(wanted),
    }


def tuning_of(body: HowBody, *, has_highlights: bool = False) -> Tuning:
    """How to search, as retrieval takes it."""
    from kvarn.retrieval.types import Tuning

    weights = (body.weights[0], body.weights[1]) if body.weights else Tuning().weights
    return Tuning(fusion=body.fusion, weights=weights, mmr=body.mmr, highlights=has_highlights)


def retrieval_fields(grounded: Grounded, answer: str | None = None) -> dict[str, Any]:
    """What an answer tells about its sources; with the answer's text, also which of them it cites."""
    return {
        "citations": [_citation(one if answer is None else one.marked(answer), answer) for one in grounded.citations],
        "left_out": list(grounded.left_out),
    }


async def after_sources(events: AsyncIterator[bytes], envelope: Envelope, grounded: Grounded) -> AsyncIterator[bytes]:
    """A stream whose first event tells the sources; it has no choice."""
    told = {**envelope.fields(), "choices": [], "retrieval": retrieval_fields(grounded)}
    yield f"data: {json.dumps(told, separators=(',', ':'))}\n\n".encode()
    async for event in events:
        yield event


def hit_fields(hit: Hit, *, has_highlights: bool = False) -> dict[str, Any]:
    """A hit as clients read it."""
    fields: dict[str, Any] = {
        "id": hit.id,
        "document": hit.document,
        "text": hit.text,
        "score": hit.score,
        "source": hit.source,
        "span": {"start": hit.span[0], "end": hit.span[1]},
        "heading": hit.heading,
        "metadata": dict(hit.metadata),
    }
    if has_highlights:
        fields["highlights"] = [{"start": start, "end": end} for start, end in hit.highlights]
    return fields


def _citation(citation: Citation, answer: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": citation.number,
        "id": citation.id,
        "document": citation.document,
        "source": citation.source,
        "span": {"start": citation.span[0], "end": citation.span[1]},
        "score": citation.score,
    }
    return fields if answer is None else {**fields, "cited": citation.is_cited}
