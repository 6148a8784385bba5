"""Retrieval in chats: from the retrieval field of a body to messages with sources and answers with citations."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.server.collections.ingestion import WantedEmbedder
from kvarn.server.collections.reranking import num_bytes_read, num_tokens_of, rerank_batches, scores_of
from kvarn.server.process.worker_threads import work_for

if TYPE_CHECKING:
    from kvarn.observe.metrics import Metrics
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import Hit, Tuning
    from kvarn.server.access.keys import Principal
    from kvarn.server.api.openai.chat_schema import ChatBody
    from kvarn.server.api.openai.envelope import Envelope
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.collections.collection_pool import CollectionPool
    from kvarn.server.collections.document_reader import DocumentReader
    from kvarn.server.collections.prefix_warmup import FrequentChat, PrefixWarmup
    from kvarn.server.collections.schema import HowBody, RetrievalBody, SearchBody
    from kvarn.server.collections.storage_quota import StorageQuota
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.process.worker_threads import TokenMeter, WorkerThreads
    from kvarn.server.request_context import RequestContext
    from kvarn.types import Citation, Grounded


@dataclass(frozen=True, slots=True)
class RetrievalServices:
    """The parts of the server that retrieval uses."""

    models: ModelPool
    collections: CollectionPool
    workers: WorkerThreads
    document_reader: DocumentReader
    storage: StorageQuota
    prefix_warmup: PrefixWarmup
    metrics: Metrics


@asynccontextmanager
async def use_collection(
    request: RequestContext, collections: CollectionPool, name: str, *, changes: bool = False
) -> AsyncIterator[Collection]:
    """Keep one of the caller's collections open while the block runs, to be searched or changed.

    It embeds at the caller's priority, for as long as the caller waits.
    """
    async with AsyncExitStack() as held:
        opening = held.enter_async_context(collections.use(request.principal.tenant, name, changes=changes))
        opened = (await request.while_awaited(opening)).at_priority(request.principal.tier.priority)
        ended = threading.Event()
        held.callback(ended.set)
        yield opened.with_embedder(WantedEmbedder(opened.embedder, ended))


async def ground(
    request: RequestContext, services: RetrievalServices, model: ServedModel, chat: Conversation, body: ChatBody
) -> Grounded:
    """Search one of the caller's collections for the last question, and put the hits into the messages."""
    retrieval = body.retrieval
    assert retrieval is not None
    async with use_collection(request, services.collections, retrieval.collection) as collection:
        await request.use_model(services.models, collection.embedder.name)
        options = grounding_options(retrieval)
        search = partial(_ground, model, chat, collection, options)
        started = time.monotonic()
        grounded = await work_for(request, services.workers, search)
        services.metrics.searched(retrieval.mode, time.monotonic() - started)
        if (frequent := _frequent_chat(request.principal, model, chat, body, collection)) is not None:
            services.prefix_warmup.add(frequent, collection.version)
    return grounded


def _ground(model: ServedModel, chat: Conversation, collection: Collection, options: dict[str, Any]) -> Grounded:
    return model.llm.llm.ground(chat.messages, collection.grounding(**options))


async def reranked(
    request: RequestContext,
    services: RetrievalServices,
    body: SearchBody,
    found: Sequence[tuple[str, Sequence[Hit]]],
    meter: TokenMeter,
) -> list[list[Hit]]:
    """The best hits of each query as the reranking model orders them; its tokens are reserved before it runs."""
    from kvarn.retrieval.search.rerank import best_hits

    assert body.rerank is not None
    model = await request.use_model(services.models, body.rerank)
    texts = [(query, [hit.text for hit in hits]) for query, hits in found]
    num_bytes = await work_for(request, services.workers, lambda: sum(num_bytes_read(*one) for one in texts))
    request.expect(num_bytes)  # before they are tokenized
    batches = [await rerank_batches(request, services.workers, model.llm.llm, *one) for one in texts]
    costs = [await num_tokens_of(request, services.workers, one) for one in batches]
    num_tokens = sum(map(sum, costs))
    request.reserve(num_tokens)
    scores = [
        await request.while_awaited(scores_of(request.principal, meter, one, cost))
        for one, cost in zip(batches, costs, strict=True)
    ]
    services.metrics.embedded(model.id, num_tokens, time.monotonic() - request.received_at)
    return [best_hits(hits, one, body.k) for (_, hits), one in zip(found, scores, strict=True)]


def _frequent_chat(
    principal: Principal, model: ServedModel, chat: Conversation, body: ChatBody, collection: Collection
) -> FrequentChat | None:
    """The chat to keep warm, if its query is a frequent one; only of first turns, as later ones seldom repeat."""
    from kvarn.retrieval.search.rag_prompt import last_question
    from kvarn.server.collections.prefix_warmup import FrequentChat

    retrieval = body.retrieval
    assert retrieval is not None
    if chat.tools or any(message["role"] == "assistant" for message in chat.messages):
        return None
    query = retrieval.query or last_question(chat.messages)
    key = collection.hot_question(query, retrieval.k, retrieval.mode, retrieval.filter, tuning_of(retrieval))
    if key is None:
        return None
    options, salt = grounding_options(retrieval), body.cache_salt or ""
    return FrequentChat(principal, salt, model.id, retrieval.collection, key, chat, options)


def with_messages(chat: Conversation, grounded: Grounded) -> Conversation:
    """The conversation with the sources in its messages."""
    return replace(chat, messages=tuple(dict(message) for message in grounded.messages))


def grounding_options(body: RetrievalBody) -> dict[str, Any]:
    """The fields of a body as Collection.grounding takes them."""
    return {
        "k": body.k,
        "mode": body.mode,
        "filter": body.filter,
        "budget": body.max_context_tokens,
        "query": body.query,
        "tuning": tuning_of(body),
    }


def tuning_of(body: HowBody, *, has_highlights: bool = False) -> Tuning:
    """The Tuning of a search body."""
    from kvarn.retrieval.types import Tuning

    weights = (body.weights[0], body.weights[1]) if body.weights else Tuning().weights
    return Tuning(fusion=body.fusion, weights=weights, mmr=body.mmr, highlights=has_highlights)


def retrieval_fields(grounded: Grounded, answer: str | None = None) -> dict[str, Any]:
    """The retrieval field of a response; with the answer's text, also which sources it cites."""
    return {
        "citations": [_citation(one if answer is None else one.marked(answer), answer) for one in grounded.citations],
        "left_out": list(grounded.left_out),
    }


async def after_sources(events: AsyncIterator[bytes], envelope: Envelope, grounded: Grounded) -> AsyncIterator[bytes]:
    """The stream with one event before it that carries the sources and no choice."""
    first = {**envelope.fields(), "choices": [], "retrieval": retrieval_fields(grounded)}
    yield f"data: {json.dumps(first, separators=(',', ':'))}\n\n".encode()
    async for event in events:
        yield event


def hit_fields(hit: Hit, *, has_highlights: bool = False) -> dict[str, Any]:
    """A hit as it is in a response."""
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
