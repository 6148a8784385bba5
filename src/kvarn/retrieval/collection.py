"""kvarn.Collection: documents in, hits out. ingest/indexer.py adds documents, search/search.py finds chunks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarn.checks import is_iterable, short, utf8
from kvarn.errors import InvalidParameter, StorageError
from kvarn.retrieval.embedder import DEFAULT_EMBEDDER, Embedder, ModelEmbedder
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.ingest.addition import Addition
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.ingest.indexer import Indexer
from kvarn.retrieval.ingest.validation import DocumentInput, checked_batches, checked_queries
from kvarn.retrieval.search.query_cache import QueryCache, cache_key
from kvarn.retrieval.search.rag_prompt import Grounding
from kvarn.retrieval.search.rerank import rerank_hits
from kvarn.retrieval.search.search import SearchOptions, find, num_reranked
from kvarn.retrieval.storage.paths import collection_folder, existing_folder
from kvarn.retrieval.types import AddReport, Float32, Hit, Mode, Tuning, check, check_k, check_mode
from kvarn.types import MAX_PRIORITY, Grounded, Message

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.retriever import ChunkStore, Retriever

OnAdded = Callable[[int], None]  # documents done so far


class Collection:
    """A named set of documents that can be searched. Methods may be called from several threads."""

    def __init__(
        self,
        name: str,
        *,
        model: str | LLM | Embedder = DEFAULT_EMBEDDER,
        folder: str | PathLike[str] | None = None,
        chunking: Chunking | None = None,
        index: Retriever | None = None,
    ) -> None:
        """Open a collection, or create it.

        model: the embedding model, by name or loaded. folder: the parent of the collection's folder, in Kvarn's home by
        default. index: a store other than the embedded one.
        """
        check.instance("chunking", chunking, Chunking, "a Chunking, or None", optional=True)
        self.name = name
        self._embedder = _as_embedder(model)
        self._index = index if index is not None else _embedded(collection_folder(name, _path(folder)))
        self.chunking = _chunking_of(self._index.store, chunking)
        self._lock = threading.Lock()  # one add at a time
        self._indexer = Indexer(self._index, name)
        self.query_cache: QueryCache[tuple[Hit, ...]] = QueryCache()

    @classmethod
    def open(
        cls, name: str, *, model: str | LLM | Embedder = DEFAULT_EMBEDDER, folder: str | PathLike[str] | None = None
    ) -> Collection:
        """Open an existing collection for searching only, while another process may be changing it."""
        index = _embedded(existing_folder(name, _path(folder)), read_only=True)
        return cls(name, model=model, index=index)

    def at_priority(self, priority: int) -> Collection:
        """The same open collection, whose texts and queries are embedded at this priority among the model's work."""
        check.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        embedder = self._embedder
        return self.with_embedder(embedder.at_priority(priority) if isinstance(embedder, ModelEmbedder) else embedder)

    def with_embedder(self, embedder: Embedder) -> Collection:
        """The same open collection, whose texts and queries another embedder embeds, of the same model."""
        view = copy.copy(self)
        view._embedder = _as_embedder(embedder)
        return view

    @property
    def is_writable(self) -> bool:
        """Whether it may be changed; not if it was opened for searching only."""
        return self._index.is_writable

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._index.version

    @property
    def embedder(self) -> Embedder:
        return self._embedder

    def __len__(self) -> int:
        return self._index.num_chunks

    def add(self, documents: DocumentInput | Iterable[DocumentInput], *, on_added: OnAdded | None = None) -> AddReport:
        """Add texts or documents, or replace those with the same id; equal content is stored once.

        Committed batch by batch: an error leaves the earlier batches in place.
        """
        check.function("on_added", on_added)
        report = AddReport()
        num_done = 0
        with self._lock:
            for batch in checked_batches(documents):
                report += self._indexer.add(batch, self.chunking, self._embedder)
                num_done += len(batch)
                if on_added is not None:
                    on_added(num_done)
        return report

    def begin_addition(self) -> Addition:
        """Begin to add documents in several steps, that are then stored all together or not at all."""
        return self._indexer.addition(self.chunking, self._embedder, self._lock)

    def delete(self, ids: str | Iterable[str]) -> int:
        """Remove documents by id; returns how many were there."""
        removed: list[Any] = list(ids) if is_iterable(ids) and not isinstance(ids, str) else [ids]
        for one in removed:
            check.instance("ids", one, str, "the ids of documents as strings")
            utf8("ids", one)
        return self._index.remove(removed) if removed else 0

    def search(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        filter: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
        *,
        rerank: LLM | None = None,
        tenant: str = "",
    ) -> list[Hit]:
        """The k chunks that match a query best, best first.

        rerank: a cross-encoder or a model that chats, which scores the candidates anew;
        tenant: salts that model's prefix cache.
        """
        if rerank is None:
            return self.search_many([query], k, mode, filter, tuning)[0]
        check_k("k", k)
        check.instance("rerank", rerank, _llm_class(), "a loaded kvarn.LLM")
        check.instance("tenant", tenant, str, "a string")
        hits = self.search_many([query], num_reranked(k, tuning), mode, filter, tuning)[0]
        return rerank_hits(rerank, query, hits, k, tenant)

    def search_many(
        self,
        queries: Sequence[str],
        k: int = 10,
        mode: Mode = "hybrid",
        filter: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> list[list[Hit]]:
        """Search for several queries, embedded together."""
        options = _options(k, mode, filter, tuning)
        keys = {text: cache_key(text, options) for text in checked_queries(queries)}
        version = self.version
        found = {text: self.query_cache.get(key, version) for text, key in keys.items()}
        missing = [text for text, hits in found.items() if hits is None]
        for text, hits in zip(missing, self._find(missing, options), strict=True):
            found[text] = hits
            self.query_cache.put(keys[text], version, hits)
        return [list(found[text] or ()) for text in queries]

    def hot_question(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        filter: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> str | None:
        """The key of a search in the query cache; None if it is not so frequent that its result is cached."""
        (text,) = checked_queries([query])
        key = cache_key(text, _options(k, mode, filter, tuning))
        return key if key in self.query_cache else None

    def ground(self, messages: Sequence[Message], count: Callable[[str], int], context: int) -> Grounded:
        """Put the hits for the last question into a conversation: `llm.chat(messages, retrieve=collection)`."""
        return Grounding(self).ground(messages, count, context)

    def grounding(self, **options: Any) -> Grounding:
        """A `retrieve=` with other options: k, mode, filter, budget, query, tuning."""
        return Grounding(self, **options)

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        return self._index.store.documents()

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""
        check.instance("source", source, str, "the path of a file or folder as a string")
        utf8("source", source)
        return self._index.store.ids_from(source)

    def stats(self) -> dict[str, Any]:
        """Counts and settings."""
        store = self._index.store
        return {
            "name": self.name,
            "documents": len(store.documents()),
            "chunks": len(self),
            "version": self.version,
            "model": store.meta("model"),
            "dim": self._index.dim,
        }

    def optimise(self) -> None:
        """Rebuild the indexes, so that removed documents no longer count in the scores."""
        self._index.optimise()

    def close(self) -> None:
        """Save, and free the embedding model if it was loaded here."""
        self._index.close()
        self._embedder.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, texts: Sequence[str], options: SearchOptions) -> list[tuple[Hit, ...]]:
        if not texts or not len(self):
            return [() for _ in texts]
        vectors: Sequence[Float32 | None] = [None] * len(texts)
        if options.mode != "sparse":
            vectors = list(self._indexer.embed_queries(texts, self._embedder))
        return [tuple(find(self._index, *query, options)) for query in zip(texts, vectors, strict=True)]


def _options(k: int, mode: Mode, filter: Mapping[str, Any] | None, tuning: Tuning | None) -> SearchOptions:
    check_k("k", k)
    check_mode(mode)
    check.instance("tuning", tuning, Tuning, "a kvarn.Tuning, or None", optional=True)
    return SearchOptions(k, mode, parse_filter(filter), tuning or Tuning())


def _chunking_of(store: ChunkStore, requested: Chunking | None) -> Chunking:
    """The requested chunking, which is stored; without one, the stored chunking."""
    tokens, overlap = store.meta("chunk_tokens"), store.meta("chunk_overlap")
    if requested is None:
        return Chunking() if tokens is None else Chunking(int(tokens), int(overlap))
    if (requested.tokens, requested.overlap) != (tokens, overlap):
        store.set_meta({"chunk_tokens": requested.tokens, "chunk_overlap": requested.overlap})
    return requested


def _as_embedder(model: object) -> Embedder:
    if isinstance(model, str | _llm_class()):
        return ModelEmbedder(model)  # type: ignore[arg-type]
    if isinstance(model, type) or not all(callable(getattr(model, name, None)) for name in ("count", "embed")):
        raise InvalidParameter(
            f"model is {short(model)}; give the name of an encoder such as minilm, or a kvarn.LLM", field="model"
        )
    return model  # type: ignore[return-value]


def _llm_class() -> type:
    from kvarn.llm import LLM

    return LLM


def _embedded(folder: Path, *, read_only: bool = False) -> Retriever:
    from kvarn.retrieval.storage.embedded_index import EmbeddedIndex

    if not read_only:
        return EmbeddedIndex(folder)
    try:
        return EmbeddedIndex(folder, read_only=True)
    except StorageError:  # damaged: repair it as a writer, unless another process is one or the folder is read-only
        return EmbeddedIndex(folder)


def _path(folder: str | PathLike[str] | None) -> Path | None:
    return None if folder is None else Path(check.path("folder", folder))
