"""Retrieval in chats: from the retrieval field of a body to messages with sources and answers with citations."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.prompts import with_constraint
from kvarn.server.collections.ingestion import WantedEmbedder
from kvarn.server.collections.reranking import num_bytes_read, num_tokens_of, rerank_batches, scores_of
from kvarn.server.process.worker_threads import work_for

if TYPE_CHECKING:
    from kvarn.citations.types import Citation, Grounded, SentenceSupport
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
        grounded = _outliving(request, collection, await work_for(request, services.workers, search))
        services.metrics.searched(retrieval.mode, time.monotonic() - started)
        if (frequent := _frequent_chat(request.principal, model, chat, body, collection)) is not None:
            version = await work_for(request, services.workers, lambda: collection.version)
            services.prefix_warmup.add(frequent, version)
    return grounded


async def attribution(
    request: RequestContext, services: RetrievalServices, grounded: Grounded, answers: Sequence[str]
) -> list[tuple[SentenceSupport, ...]]:
    """Which sources support which sentences of each answer, found in a worker thread: the sentences are embedded."""
    return await work_for(request, services.workers, lambda: [grounded.attributed(answer) for answer in answers])


def _ground(model: ServedModel, chat: Conversation, collection: Collection, options: dict[str, Any]) -> Grounded:
    return model.llm.llm.ground(chat.messages, collection.grounding(**options))


def _outliving(request: RequestContext, collection: Collection, grounded: Grounded) -> Grounded:
    """With an attributor for when the answer is there, and the collection perhaps closed: the model is held."""
    from kvarn.retrieval.search.attribution import SourceAttributor

    attributor, embedder = grounded.attributor, collection.embedder
    if not isinstance(attributor, SourceAttributor) or not isinstance(embedder, WantedEmbedder):
        return grounded
    return replace(grounded, attributor=replace(attributor, embedder=embedder.until(request.ended)))


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
    await request.expect(num_bytes)  # before they are tokenized
    batches = [await rerank_batches(request, services.workers, model.llm.llm, *one) for one in texts]
    costs = [await num_tokens_of(request, services.workers, one) for one in batches]
    num_tokens = sum(map(sum, costs))
    await request.reserve(num_tokens)
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


def grounded_chat(chat: Conversation, grounded: Grounded, model: ServedModel) -> Conversation:
    """The conversation with its sources, and an answer of the form that retrieval asks for."""
    chat = with_messages(chat, grounded)
    return chat if chat.tools else replace(chat, params=with_constraint(chat.params, grounded, model.llm.llm.spec))


def grounding_options(body: RetrievalBody) -> dict[str, Any]:
    """The fields of a body as Collection.grounding takes them."""
    return {
        "k": body.k,
        "mode": body.mode,
        "filter": body.filter,
        "budget": body.max_context_tokens,
        "query": body.query,
        "tuning": tuning_of(body),
        **{
            name: getattr(body, name)
            for name in ("min_relevance", "refusal", "cite")
            if getattr(body, name) is not None
        },
    }


def tuning_of(body: HowBody, *, has_highlights: bool = False) -> Tuning:
    """The Tuning of a search body."""
    from kvarn.retrieval.types import Tuning

    weights = (body.weights[0], body.weights[1]) if body.weights else Tuning().weights
    return Tuning(
        fusion=body.fusion,
        weights=weights,
        per_document=body.per_document,
        min_score=body.min_score,
        mmr=body.mmr,
        highlights=has_highlights,
    )


def retrieval_fields(
    grounded: Grounded, attributed: Sequence[Sequence[SentenceSupport]] | None = None, *, has_passages: bool = False
) -> dict[str, Any]:
    """The retrieval field of a response; with the sentences of each answer, also what supports them."""
    citations, is_known = grounded.citations, attributed is not None
    if attributed is not None:
        citations = grounded.cited([sentence for one in attributed for sentence in one])
    fields: dict[str, Any] = {
        "citations": [_citation(one, is_known=is_known, has_passage=has_passages) for one in citations],
        "left_out": list(grounded.left_out),
        "refused": grounded.is_refused,
    }
    if attributed is not None:
        fields["sentences"] = [_sentence(index, sentence) for index, one in enumerate(attributed) for sentence in one]
    return fields


async def between_sources_and_support(
    events: AsyncIterator[bytes],
    envelope: Envelope,
    grounded: Grounded,
    attribute: Callable[[], Awaitable[list[tuple[SentenceSupport, ...]]]],
    *,
    has_passages: bool = False,
) -> AsyncIterator[bytes]:
    """The stream with one event before it that carries the sources, and one behind it with what supports the answer."""
    yield _event(envelope, retrieval_fields(grounded, has_passages=has_passages))
    async for event in events:
        yield event
    if grounded.citations:
        yield _event(envelope, retrieval_fields(grounded, await attribute()))


def _event(envelope: Envelope, fields: dict[str, Any]) -> bytes:
    """An event without a choice."""
    written = json.dumps({**envelope.fields(), "choices": [], "retrieval": fields}, separators=(",", ":"))
    return f"data: {written}\n\n".encode()


def hit_fields(hit: Hit, *, has_highlights: bool = False) -> dict[str, Any]:
    """A hit as it is in a response."""
    fields: dict[str, Any] = {
        "id": hit.id,
        "document": hit.document,
        "text": hit.text,
        "score": hit.score,
        "source": hit.source,
        "relevance": hit.relevance,
        "span": _span(hit.span),
        **_place(hit),
        "heading": hit.heading,
        "metadata": dict(hit.metadata),
    }
    if has_highlights:
        fields["highlights"] = [{"start": start, "end": end} for start, end in hit.highlights]
    return fields


def _citation(citation: Citation, *, is_known: bool, has_passage: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": citation.number,
        "id": citation.id,
        "document": citation.document,
        "source": citation.source,
        "span": _span(citation.span),
        **_place(citation),
        "score": citation.score,
        "relevance": citation.relevance,
    }
    if has_passage:
        fields["text"] = citation.text
    return {**fields, "cited": citation.is_cited} if is_known else fields


def _sentence(choice: int, sentence: SentenceSupport) -> dict[str, Any]:
    passages = [{"number": one.number, "span": _span(one.span), "score": one.score} for one in sentence.passages]
    return {
        "choice": choice,
        "span": _span(sentence.span),
        "supported": sentence.is_supported,
        "score": sentence.score,
        "passages": passages,
    }


def _span(span: tuple[int, int]) -> dict[str, int]:
    return {"start": span[0], "end": span[1]}


def _place(found: Hit | Citation) -> dict[str, Any]:
    """Its lines or its page, where they are known."""
    if found.lines is not None:
        return {"lines": {"first": found.lines[0], "last": found.lines[1]}}
    return {} if found.page is None else {"page": found.page}
