"""kvarn.Collection: documents in, hits out. ingest/indexer.py adds documents, search/search.py finds chunks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarn.checks import is_iterable, utf8
from kvarn.citations.types import Grounded
from kvarn.retrieval.embedder import Embedder, ModelEmbedder
from kvarn.retrieval.ingest.addition import Addition
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.ingest.folder_sync import SyncReport, places_of, sync_folder
from kvarn.retrieval.ingest.indexer import Indexer, chunking_of
from kvarn.retrieval.ingest.validation import DocumentInput, checked_batches, checked_queries
from kvarn.retrieval.opening import as_embedder, llm_class, own_embedder, searchable_index, writable_index
from kvarn.retrieval.search.attribution import SourceAttributor, source_attributor
from kvarn.retrieval.search.query_cache import QueryCache, cache_key
from kvarn.retrieval.search.rag_prompt import Grounding
from kvarn.retrieval.search.rerank import rerank_hits
from kvarn.retrieval.search.search import SearchOptions, find, num_reranked
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE
from kvarn.retrieval.types import AddReport, Float32, Hit, Mode, Tuning, check, check_k
from kvarn.types import MAX_PRIORITY, Message

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.retriever import Retriever

OnAdded = Callable[[int], None]  # documents done so far


class Collection:
    """A named set of documents that can be searched. Methods may be called from several threads."""

    def __init__(
        self,
        name: str,
        *,
        model: str | LLM | Embedder | None = None,
        folder: str | PathLike[str] | None = None,
        chunking: Chunking | None = None,
        index: Retriever | None = None,
    ) -> None:
        """Open a collection, or create it.

        model: the embedding model, by name or loaded; by default the collection's own, minilm for a new one.
        folder: the parent of the collection's folder, in Kvarn's home by default. index: another store than the
        embedded one.
        """
        check.instance("chunking", chunking, Chunking, "a Chunking, or None", optional=True)
        self.name = name
        embedder = None if model is None else as_embedder(model)
        self._index = index if index is not None else writable_index(name, folder)
        self._embedder = embedder or own_embedder(self._index)
        self.chunking = chunking_of(self._index.store, chunking)
        self._lock = threading.Lock()  # one add at a time
        self._indexer = Indexer(self._index, name)
        self.query_cache: QueryCache[tuple[Hit, ...]] = QueryCache()

    @classmethod
    def open(
        cls, name: str, *, model: str | LLM | Embedder | None = None, folder: str | PathLike[str] | None = None
    ) -> Collection:
        """Open an existing collection for searching only, while another process may be changing it."""
        return cls(name, model=model, index=searchable_index(name, folder))

    def at_priority(self, priority: int) -> Collection:
        """The same open collection, whose texts and queries are embedded at this priority among the model's work."""
        check.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        embedder = self._embedder
        return self.with_embedder(embedder.at_priority(priority) if isinstance(embedder, ModelEmbedder) else embedder)

    def with_embedder(self, embedder: Embedder) -> Collection:
        """The same open collection, whose texts and queries another embedder embeds, of the same model."""
        view = copy.copy(self)
        view._embedder = as_embedder(embedder)
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
    def folder(self) -> Path | None:
        """Where its files are; None if they are on another machine."""
        return self._index.folder

    @property
    def embedder(self) -> Embedder:
        return self._embedder

    @property
    def language(self) -> str:
        """The language whose stop words and stems its words have."""
        return str(self._index.store.meta("language", DEFAULT_LANGUAGE))

    def attributor(self, question: str, hits: Sequence[Hit]) -> SourceAttributor:
        """What finds out which of these hits support which sentences of an answer."""
        return source_attributor(self._index, question, hits, self._embedder)

    def __len__(self) -> int:
        return self._index.num_chunks

    def add(self, documents: DocumentInput | Iterable[DocumentInput], *, on_added: OnAdded | None = None) -> AddReport:
        """Add texts or documents, or replace those with the same id; equal content is stored once.

        Committed batch by batch: an error leaves the earlier batches in place.
        """
        check.function("on_added", on_added)
        report = AddReport()
        num_done = 0
        with self._lock, self._index.bulk():
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
        check.instance("rerank", rerank, llm_class(), "a loaded kvarn.LLM")
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
        options = SearchOptions.checked(k, mode, filter, tuning)
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
        key = cache_key(text, SearchOptions.checked(k, mode, filter, tuning))
        return key if key in self.query_cache else None

    def ground(self, messages: Sequence[Message], count: Callable[[str], int], context: int) -> Grounded:
        """Put the hits for the last question into a conversation: `llm.chat(messages, retrieve=collection)`."""
        return Grounding(self).ground(messages, count, context)

    def grounding(self, **options: Any) -> Grounding:
        """A `retrieve=` with other options: the fields of Grounding.

        k, mode, filter, tuning: of the search; query: instead of the last question; budget: tokens for all sources;
        min_relevance: of the best hit, else the answer is the refusal; cite: free or every_sentence.
        """
        return Grounding(self, **options)

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        return self._index.store.documents()

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""
        check.instance("source", source, str, "the path of a file or folder as a string")
        utf8("source", source)
        return self._index.store.ids_from(source)

    def files_below(self, folder: str) -> dict[str, bytes]:
        """Content hashes of the documents that are files below a folder: their id is their path."""
        if folder != ".":
            return dict(self._index.store.files_below(folder))
        ids = [one["id"] for one in self.documents() if one["id"] == one["source"] and "." in places_of(one["id"])]
        return dict(self._index.store.digests(ids))

    def rename(self, moves: Mapping[str, str]) -> dict[str, str]:
        """Give documents new ids, and sources, without embedding them again; those that have the new ids are removed.

        Returns the moves that were made; a store that cannot rename makes none.
        """
        with self._lock:
            return dict(self._index.rename(moves)) if moves else {}

    def sync(self, folder: str | PathLike[str], *, force: bool = False, on_added: OnAdded | None = None) -> SyncReport:
        """Bring the documents of a folder in step with its files: new, changed, moved and deleted ones.

        force: also if most of its documents would be removed, or the folder is empty.
        """
        with self._index.bulk():
            return sync_folder(self, check.path("folder", folder), force=force, on_added=on_added)

    def stats(self) -> dict[str, Any]:
        """Counts and settings."""
        return {
            "name": self.name,
            "documents": len(self.documents()),
            "chunks": len(self),
            "version": self.version,
            "model": self._index.store.meta("model"),
            "dim": self._index.dim,
            "language": self.language,
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
