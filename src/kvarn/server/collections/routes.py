"""/v1/collections: make, fill, search and remove the caller's own collections of documents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.schema import body_of
from kvarn.server.collections.chat_retrieval import hit_fields, reranked, tuning_of, using
from kvarn.server.collections.ingestion import read_documents
from kvarn.server.collections.schema import (
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
from kvarn.server.dependencies import Called, Charged, Collections, PdfReader, Retrieval, Workers
from kvarn.server.http.disconnect import while_awaited
from kvarn.server.process.worker_threads import TokenMeter, work_for

if TYPE_CHECKING:
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import AddReport, Document, Hit
    from kvarn.server.process.worker_threads import WorkerThreads
    from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["collections"])
GROUP = 16  # documents embedded before somebody looks whether the client is still there, or fewer ...
GROUP_TOKENS = 8192  # ... if they have more tokens than this


@router.get("/v1/collections", response_model=CollectionsAnswer)
async def list_collections(request: Called, collections: Collections) -> Response:
    """List the caller's collections."""
    names = await while_awaited(request, collections.names(request.principal.tenant))
    return request.reply({"object": "list", "data": [{"object": "collection", "name": name} for name in names]})


@router.post("/v1/collections", response_model=CollectionAnswer, openapi_extra=body_of(CollectionBody))
async def create_collection(request: Charged, collections: Collections, workers: Workers) -> Response:
    """Begin a collection; one that exists stays as it is."""
    body = await request.body(CollectionBody)
    chunking = await work_for(request, workers, _chunking, body)
    await while_awaited(request, collections.create(request.principal.tenant, body.name, chunking))
    async with using(request, collections, body.name) as collection:
        return request.reply(await work_for(request, workers, _described, collection))


@router.get("/v1/collections/{name}", response_model=CollectionAnswer)
async def show_collection(request: Called, collections: Collections, workers: Workers, name: str) -> Response:
    """Tell what a collection holds."""
    async with using(request, collections, name) as collection:
        return request.reply(await work_for(request, workers, _described, collection))


@router.delete("/v1/collections/{name}", response_model=DeletedAnswer)
async def drop_collection(request: Called, collections: Collections, name: str) -> Response:
    """Remove a collection with everything in it."""
    await while_awaited(request, collections.drop(request.principal.tenant, name))
    return request.reply({"deleted": 1})


@router.get("/v1/collections/{name}/documents", response_model=CollectionsAnswer)
async def list_documents(request: Called, collections: Collections, workers: Workers, name: str) -> Response:
    """List the documents of a collection."""
    async with using(request, collections, name) as collection:
        return request.reply({"object": "list", "data": await work_for(request, workers, collection.documents)})


@router.post("/v1/collections/{name}/documents", response_model=AddAnswer, openapi_extra=body_of(DocumentsBody))
async def add_documents(request: Charged, retrieval: Retrieval, reader: PdfReader, name: str) -> Response:
    """Add documents, or replace those with the same id; committed a few at a time."""
    body = await request.body(DocumentsBody)
    async with using(request, retrieval.collections, name) as collection:
        await request.use_model(retrieval.models, collection.embedder.name)
        documents = await while_awaited(request, read_documents(body.documents, reader, retrieval.workers))
        costs = await _reserve(request, retrieval.workers, collection, [document.text for document in documents])
        spending = TokenMeter(retrieval.workers)
        try:
            report = await while_awaited(request, _add(collection, documents, costs, spending))
        finally:
            request.reservation.settle(spending.num_tokens)
    retrieval.metrics.documents_added(report.added + report.updated, report.chunks)
    fields = asdict(report)
    del fields["failed"]
    return request.reply(fields)


@router.post("/v1/collections/{name}/documents/delete", response_model=DeletedAnswer, openapi_extra=body_of(DeleteBody))
async def delete_documents(request: Charged, collections: Collections, workers: Workers, name: str) -> Response:
    """Remove documents by id."""
    body = await request.body(DeleteBody)
    async with using(request, collections, name) as collection:
        return request.reply({"deleted": await work_for(request, workers, collection.delete, body.ids)})


@router.post("/v1/collections/{name}/search", response_model=SearchAnswer, openapi_extra=body_of(SearchBody))
async def search_collection(request: Charged, retrieval: Retrieval, name: str) -> Response:
    """Find the chunks that answer a question best."""
    body = await request.body(SearchBody)
    queries = [body.query] if isinstance(body.query, str) else body.query
    async with using(request, retrieval.collections, name) as collection:
        await request.use_model(retrieval.models, collection.embedder.name)
        num_tokens = sum(await _reserve(request, retrieval.workers, collection, queries))
        spending = TokenMeter(retrieval.workers)
        try:
            started = time.monotonic()
            found = await while_awaited(request, spending.run(num_tokens, _search, collection, queries, body))
            if body.rerank is not None:
                found = await reranked(request, retrieval, body, list(zip(queries, found, strict=True)), spending)
            retrieval.metrics.searched(body.mode, time.monotonic() - started)
        finally:
            request.reservation.settle(spending.num_tokens)
        version = collection.version
    data: list[Any] = [[hit_fields(hit, has_highlights=body.highlights) for hit in hits] for hits in found]
    num_tokens = request.reservation.num_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    told = data[0] if isinstance(body.query, str) else data
    return request.reply({"object": "list", "data": told, "version": version, "usage": usage})


async def _reserve(
    request: RequestContext, workers: WorkerThreads, collection: Collection, texts: Sequence[str]
) -> list[int]:
    """Take the tokens of each text, which the embedding model will read."""
    costs = await work_for(request, workers, lambda: list(map(collection.embedder.count, texts)))
    request.reserve(sum(costs))
    return costs


async def _add(
    collection: Collection, documents: Sequence[Document], costs: Sequence[int], spending: TokenMeter
) -> AddReport:
    """Group by group, so that a client that goes away stops the rest."""
    from kvarn.retrieval.types import AddReport

    report = AddReport()
    for group in _groups(costs):
        report += await spending.run(sum(costs[group]), collection.add, documents[group])
    return report


def _groups(costs: Sequence[int]) -> Iterator[slice]:
    start = num_tokens = 0
    for number, cost in enumerate(costs):
        if number > start and (number - start == GROUP or num_tokens + cost > GROUP_TOKENS):
            yield slice(start, number)
            start, num_tokens = number, 0
        num_tokens += cost
    yield slice(start, len(costs))


def _search(collection: Collection, queries: Sequence[str], body: SearchBody) -> list[list[Hit]]:
    """The hits, or as many as the reranking model is to read."""
    from kvarn.retrieval.search.search import num_reranked

    tuning = tuning_of(body, has_highlights=body.highlights)
    k = body.k if body.rerank is None else num_reranked(body.k, tuning)
    return collection.search_many(queries, k, body.mode, body.filter, tuning)


def _described(collection: Collection) -> dict[str, Any]:
    return {"object": "collection", **collection.stats()}


def _chunking(body: CollectionBody) -> Any:
    from kvarn.retrieval.ingest.chunking import Chunking

    return Chunking(body.chunk_tokens, body.overlap)
