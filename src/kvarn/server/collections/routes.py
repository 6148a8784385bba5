"""/v1/collections: create, fill, search and remove the caller's own collections of documents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.schema import InvalidField, body_of
from kvarn.server.collections.chat_retrieval import hit_fields, reranked, tuning_of, use_collection
from kvarn.server.collections.ingestion import cost_in_bytes, least_cost, num_bytes_of, read_documents
from kvarn.server.collections.schema import (
    MAX_HITS_TOGETHER,
    AddAnswer,
    CollectionAnswer,
    CollectionBody,
    CollectionsAnswer,
    DeleteBody,
    DeletedAnswer,
    DocumentsBody,
    SearchAnswer,
    SearchBody,
)
from kvarn.server.dependencies import Called, Charged, Retrieval
from kvarn.server.process.worker_threads import TokenMeter, work_for

if TYPE_CHECKING:
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import AddReport, Document, Hit
    from kvarn.server.process.worker_threads import WorkerThreads
    from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["collections"])
GROUP = 16  # documents embedded between two checks whether the client is still connected, or fewer ...
GROUP_TOKENS = 8192  # ... if they have more tokens than this


@router.get("/v1/collections", response_model=CollectionsAnswer)
async def list_collections(request: Called, retrieval: Retrieval) -> Response:
    """List the caller's collections."""
    names = await request.while_awaited(retrieval.collections.names(request.principal.tenant))
    return request.reply({"object": "list", "data": [{"object": "collection", "name": name} for name in names]})


@router.post("/v1/collections", response_model=CollectionAnswer, openapi_extra=body_of(CollectionBody))
async def create_collection(request: Charged, retrieval: Retrieval) -> Response:
    """Begin a collection; one that exists stays as it is."""
    body = await request.body(CollectionBody)
    chunking = await work_for(request, retrieval.workers, _chunking, body)
    async with retrieval.storage.reserved(request.principal, 0):
        await request.while_awaited(retrieval.collections.create(request.principal.tenant, body.name, chunking))
    async with use_collection(request, retrieval.collections, body.name) as collection:
        return request.reply(await work_for(request, retrieval.workers, _described, collection))


@router.get("/v1/collections/{name}", response_model=CollectionAnswer)
async def show_collection(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Tell what a collection holds."""
    async with use_collection(request, retrieval.collections, name) as collection:
        return request.reply(await work_for(request, retrieval.workers, _described, collection))


@router.delete("/v1/collections/{name}", response_model=DeletedAnswer)
async def drop_collection(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Remove a collection with everything in it."""
    await request.while_awaited(retrieval.collections.drop(request.principal.tenant, name))
    return request.reply({"deleted": 1})


@router.get("/v1/collections/{name}/documents", response_model=CollectionsAnswer)
async def list_documents(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """List the documents of a collection."""
    async with use_collection(request, retrieval.collections, name) as collection:
        documents = await work_for(request, retrieval.workers, collection.documents)
        return await request.reply_from_thread(lambda: {"object": "list", "data": documents})


@router.post("/v1/collections/{name}/documents", response_model=AddAnswer, openapi_extra=body_of(DocumentsBody))
async def add_documents(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Add documents, or replace those with the same id: all of them, or none if one cannot be."""
    body = await request.body(DocumentsBody)
    taken = await request.on_body(lambda: least_cost(body.documents))
    await request.reserve(taken)  # before anything is made of them: that takes time too
    async with use_collection(request, retrieval.collections, name, changes=True) as collection:
        await request.use_model(retrieval.models, collection.embedder.name)
        claim = request.principal.claim
        reading = read_documents(body.documents, retrieval.document_reader, retrieval.workers, claim)
        documents = await request.while_awaited(reading)
        texts = [document.text for document in documents]
        num_bytes = await work_for(request, retrieval.workers, lambda: sum(map(num_bytes_of, texts)))
        async with retrieval.storage.reserved(request.principal, num_bytes):
            costs = await _reserve(request, retrieval.workers, collection, texts, taken)
            meter = TokenMeter(request, retrieval.workers)
            try:
                report = await request.while_awaited(_add(collection, documents, costs, meter))
            finally:
                request.use(meter.num_tokens)
    retrieval.metrics.documents_added(report.added + report.updated, report.chunks)
    fields = asdict(report)
    del fields["failed"]
    return request.reply(fields)


@router.post("/v1/collections/{name}/documents/delete", response_model=DeletedAnswer, openapi_extra=body_of(DeleteBody))
async def delete_documents(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Remove documents by id."""
    body = await request.body(DeleteBody)
    async with use_collection(request, retrieval.collections, name, changes=True) as collection:
        return request.reply({"deleted": await work_for(request, retrieval.workers, collection.delete, body.ids)})


@router.post("/v1/collections/{name}/search", response_model=SearchAnswer, openapi_extra=body_of(SearchBody))
async def search_collection(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Find the chunks that answer a question best."""
    body = await request.body(SearchBody)
    queries = [body.query] if isinstance(body.query, str) else body.query
    _check_hits(len(queries), body.k)
    async with use_collection(request, retrieval.collections, name) as collection:
        await request.use_model(retrieval.models, collection.embedder.name)
        num_tokens = sum(await _reserve(request, retrieval.workers, collection, queries))
        meter = TokenMeter(request, retrieval.workers)
        try:
            started = time.monotonic()
            found = await request.while_awaited(meter.run(num_tokens, _search, collection, queries, body))
            if body.rerank is not None:
                found = await reranked(request, retrieval, body, list(zip(queries, found, strict=True)), meter)
            retrieval.metrics.searched(body.mode, time.monotonic() - started)
        finally:
            request.use(meter.num_tokens)
        version = await work_for(request, retrieval.workers, lambda: collection.version)
    num_tokens = request.reservation.num_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    def answer() -> dict[str, Any]:
        data: list[Any] = [[hit_fields(hit, has_highlights=body.highlights) for hit in hits] for hits in found]
        results = data[0] if isinstance(body.query, str) else data
        return {"object": "list", "data": results, "version": version, "usage": usage}

    return await request.reply_from_thread(answer)


def _check_hits(num_queries: int, k: int) -> None:
    if num_queries * k > MAX_HITS_TOGETHER:
        raise InvalidField(
            f"{num_queries} queries with k = {k:,} ask for {num_queries * k:,} hits, at most {MAX_HITS_TOGETHER:,} are "
            "found at once; lower k or send fewer",
            "k",
        )


async def _reserve(
    request: RequestContext, workers: WorkerThreads, collection: Collection, texts: Sequence[str], taken: int = 0
) -> list[int]:
    """Reserve what each text costs beyond what was taken: its tokens for the model, and at least its share of bytes."""
    least = await work_for(request, workers, lambda: list(map(cost_in_bytes, texts)))
    await request.reserve(max(0, sum(least) - taken))  # a PDF may hold more text than it has bytes
    costs = await work_for(request, workers, lambda: list(map(max, least, map(collection.embedder.count, texts))))
    await request.reserve(max(0, sum(costs) - max(sum(least), taken)))
    return costs


async def _add(
    collection: Collection, documents: Sequence[Document], costs: Sequence[int], meter: TokenMeter
) -> AddReport:
    """Embed group by group, of which those after a disconnect are left out; then store all of them or none."""
    addition = collection.begin_addition()
    for group in _groups(costs):
        await meter.run(sum(costs[group]), addition.embed, documents[group])
    return await meter.run(0, addition.commit)


def _groups(costs: Sequence[int]) -> Iterator[slice]:
    start = num_tokens = 0
    for number, cost in enumerate(costs):
        if number > start and (number - start == GROUP or num_tokens + cost > GROUP_TOKENS):
            yield slice(start, number)
            start, num_tokens = number, 0
        num_tokens += cost
    yield slice(start, len(costs))


def _search(collection: Collection, queries: Sequence[str], body: SearchBody) -> list[list[Hit]]:
    """The hits, or the candidates for the reranking model."""
    from kvarn.retrieval.search.search import num_reranked

    tuning = tuning_of(body, has_highlights=body.highlights)
    k = body.k if body.rerank is None else num_reranked(body.k, tuning)
    return collection.search_many(queries, k, body.mode, body.filter, tuning)


def _described(collection: Collection) -> dict[str, Any]:
    return {"object": "collection", **collection.stats()}


def _chunking(body: CollectionBody) -> Any:
    from kvarn.retrieval.ingest.chunking import Chunking

    return Chunking(body.chunk_tokens, body.overlap)
