"""kvarn.Collection: documents in, hits out. Joins an index, an embedding model and the cutting of documents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvarn.errors import InvalidParameter, RetrievalError, StorageError
from kvarn.retrieval.context import Grounding
from kvarn.retrieval.embedder import DEFAULT_EMBEDDER, MIN_LIKENESS, PROBE, Embedder, ModelEmbedder
from kvarn.retrieval.filters import Condition, parse_filter
from kvarn.retrieval.hot import HotCache, question_of
from kvarn.retrieval.ingest.chunking import Chunking, cut
from kvarn.retrieval.library import collection_folder, existing_folder
from kvarn.retrieval.rerank import rerank_hits
from kvarn.retrieval.search import CANDIDATES, Query, find
from kvarn.retrieval.types import (
    MAX_K,
    MAX_QUERY_CHARS,
    AddReport,
    Document,
    Entry,
    Float32,
    Hit,
    Mode,
    Tuning,
    check_k,
    check_mode,
    check_text,
)
from kvarn.types import Grounded, Message

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.protocol import Retriever

Given = str | Document | Mapping[str, Any]
OnAdded = Callable[[int], None]  # documents done so far
BATCH_DOCUMENTS = 64  # committed together: what a crash can lose
BATCH_CHARS = 200_000
MAX_QUERIES = 1024


class _How(NamedTuple):
    """Everything about a search but its query."""

    k: int
    mode: Mode
    where: Condition | None
    tuning: Tuning


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
        """Open a collection, or begin one.

        model: what embeds, an encoder's name or a loaded one. folder: where collections lie, Kvarn's home by default.
        index: another store than the embedded one.
        """
        self.name = name
        self._embedder = _as_embedder(model)
        self._index = index if index is not None else _embedded(collection_folder(name, _path(folder)))
        self.chunking = _settled(self._index, chunking)
        self._lock = threading.Lock()  # one add at a time
        self._is_known_model = False
        self.hot: HotCache[tuple[Hit, ...]] = HotCache()

    @classmethod
    def open(
        cls, name: str, *, model: str | LLM | Embedder = DEFAULT_EMBEDDER, folder: str | PathLike[str] | None = None
    ) -> Collection:
        """Open a collection for searching only; it must exist. Another process may be changing it."""
        index = _embedded(existing_folder(name, _path(folder)), read_only=True)
        return cls(name, model=model, index=index)

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._index.version

    @property
    def embedder(self) -> Embedder:
        return self._embedder

    def __len__(self) -> int:
        return self._index.num_chunks

    def add(self, documents: Given | Iterable[Given], *, on_added: OnAdded | None = None) -> AddReport:
        """Add texts or documents, or replace those with the same id; equal content is stored once.

        Committed a batch at a time: what fails later leaves the earlier batches in place.
        """
        report = AddReport()
        seen: set[str] = set()
        num_done = 0
        with self._lock:
            for batch in _batches(_checked(documents, seen)):
                report += self._add_batch(batch)
                num_done += len(batch)
                if on_added is not None:
                    on_added(num_done)
        return report

    def delete(self, ids: str | Iterable[str]) -> int:
        """Remove documents by id; returns how many were there."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if not all(isinstance(one, str) for one in wanted):
            raise InvalidParameter("ids has something that is no string; give the ids of documents")
        return self._index.remove(wanted) if wanted else 0

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
        """The k chunks that answer a query best, best first.

        rerank: a cross-encoder or a model that chats, which reads the candidates and orders them anew;
        tenant: salts that model's prefix cache.
        """
        if rerank is None:
            return self.search_many([query], k, mode, filter, tuning)[0]
        check_k("k", k)
        depth = (tuning or Tuning()).candidates or min(CANDIDATES * k, MAX_K)
        return rerank_hits(rerank, query, self.search_many([query], depth, mode, filter, tuning)[0], k, tenant)

    def search_many(
        self,
        queries: Sequence[str],
        k: int = 10,
        mode: Mode = "hybrid",
        filter: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> list[list[Hit]]:
        """Search for several queries, embedded together."""
        check_k("k", k)
        check_mode(mode)
        where = parse_filter(filter)
        how = _How(k, mode, where, tuning or Tuning())
        questions = {text: question_of(text, how=how) for text in _checked_queries(queries)}
        version = self.version
        found = {text: self.hot.ask(question, version) for text, question in questions.items()}
        unknown = [text for text, hits in found.items() if hits is None]
        for text, hits in zip(unknown, self._find(unknown, how), strict=True):
            found[text] = hits
            self.hot.tell(questions[text], version, hits)
        return [list(found[text] or ()) for text in queries]

    def hot_question(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        filter: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> str | None:
        """The name of a search if it is asked so often that its result is kept; None if it is not."""
        question = question_of(query, how=_How(k, mode, parse_filter(filter), tuning or Tuning()))
        return question if self.hot.has(question) else None

    def ground(self, messages: Sequence[Message], count: Callable[[str], int], context: int) -> Grounded:
        """Put what is found about the last question into a conversation: `llm.chat(messages, retrieve=collection)`."""
        return Grounding(self).ground(messages, count, context)

    def grounding(self, **options: Any) -> Grounding:
        """The same with other options: k, mode, filter, budget, query, tuning."""
        return Grounding(self, **options)

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        return self._index.documents()

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file or folder."""
        return self._index.ids_from(source)

    def stats(self) -> dict[str, Any]:
        """Counts and settings."""
        documents = self._index.documents()
        return {
            "name": self.name,
            "documents": len(documents),
            "chunks": len(self),
            "version": self.version,
            "model": self._index.fact("model"),
            "dim": self._index.dim,
        }

    def optimise(self) -> None:
        """Leave no trace of removed documents in the scores."""
        self._index.optimise()

    def close(self) -> None:
        """Save, and free the embedding model if it is our own."""
        self._index.close()
        self._embedder.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, texts: Sequence[str], how: _How) -> list[tuple[Hit, ...]]:
        if not texts or not len(self):
            return [() for _ in texts]
        vectors = [None] * len(texts) if how.mode == "sparse" else list(self._embed_queries(texts))
        queries = [Query(text, vector, *how) for text, vector in zip(texts, vectors, strict=True)]
        return [tuple(find(self._index, query)) for query in queries]

    def _add_batch(self, batch: Sequence[Document]) -> AddReport:
        known = self._index.digests([document.key for document in batch])
        fresh = [document for document in batch if known.get(document.key) != document.digest]
        owners = dict(self._index.owners([document.digest for document in fresh]))
        entries, duplicates = [], {}
        for document in fresh:
            owner = owners.setdefault(document.digest, document.key)
            if owner != document.key:
                duplicates[document.key] = owner
            else:
                entries.append(document)
        num_chunks = self._put(entries)
        num_updated = sum(document.key in known for document in entries)
        return AddReport(
            added=len(entries) - num_updated,
            updated=num_updated,
            unchanged=len(batch) - len(fresh),
            chunks=num_chunks,
            duplicates=duplicates,
        )

    def _put(self, documents: Sequence[Document]) -> int:
        if not documents:
            return 0
        self._require_same_model()
        count = self._embedder.count
        chunking = self._fitting()
        cuts = [cut(document, chunking, count) for document in documents]
        vectors = self._embedder.embed([piece.searchable for pieces in cuts for piece in pieces])
        entries, start = [], 0
        for document, pieces in zip(documents, cuts, strict=True):
            part = vectors[start : start + len(pieces)]
            start += len(pieces)
            entries.append(Entry(document.key, document.source, document.digest, document.metadata, pieces, part))
        self._index.put(entries)
        return start

    def _fitting(self) -> Chunking:
        """The wished chunking, or the longest the model can embed."""
        limit = self._embedder.max_tokens
        if self.chunking.tokens <= limit:
            return self.chunking
        raise InvalidParameter(f"chunks of {self.chunking.tokens} tokens were asked for, the model embeds {limit}")

    def _embed_queries(self, texts: Sequence[str]) -> Float32:
        """One unit vector per query; a query too long for the model is the mean of its parts."""
        self._require_same_model()
        chunking = Chunking(self._embedder.max_tokens, 0)
        parts = [cut(Document(text), chunking, self._embedder.count) for text in texts]
        vectors = self._embedder.embed([piece.text for pieces in parts for piece in pieces])
        sizes = np.cumsum([0, *map(len, parts)])
        means = [vectors[a:b].mean(axis=0) for a, b in itertools.pairwise(sizes)]
        return np.asarray([mean / max(float(np.linalg.norm(mean)), 1e-12) for mean in means], np.float32)

    def _require_same_model(self) -> None:
        """Remember what the first model makes of a fixed sentence; refuse another that differs."""
        if self._is_known_model:
            return
        mine = self._embedder.embed([PROBE])[0]
        blob = self._index.fact("probe")
        if blob is None:
            self._index.set_facts({"probe": mine.tobytes(), "model": self._embedder.name})
        else:
            theirs = np.frombuffer(blob, np.float32)
            if theirs.shape != mine.shape or float(theirs @ mine) < MIN_LIKENESS:
                raise RetrievalError(
                    f"collection {self.name!r} was made with the embedding model {self._index.fact('model')!r} "
                    f"({len(theirs)} dimensions), not {self._embedder.name!r} ({len(mine)}); open it with that one, "
                    "or index the documents again"
                )
        self._is_known_model = True


def _checked(documents: Given | Iterable[Given], seen: set[str]) -> Iterator[Document]:
    given = [documents] if isinstance(documents, str | Document | Mapping) else documents
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise InvalidParameter(f"documents is {documents!r:.60}; give texts or documents")
    for number, one in enumerate(given):
        document = as_document(one, number)
        if document.key in seen and document.id is not None:
            raise InvalidParameter(f"two documents have the id {document.key!r:.80}; give each its own")
        if document.key not in seen:
            seen.add(document.key)
            yield document


def require_own_ids(documents: Iterable[Document]) -> None:
    """Refuse two documents with one id."""
    for _ in _checked(documents, set()):
        pass


def as_document(given: object, number: int) -> Document:
    """A document from a text or its fields."""
    if isinstance(given, str):
        given = Document(given)
    elif isinstance(given, Mapping):
        unknown = set(given) - {"text", "id", "source", "metadata", "kind"}
        if unknown or "text" not in given:
            raise InvalidParameter(
                f"document {number} has the fields {', '.join(map(repr, sorted(map(str, given))))}; "
                "use text, and id, source, metadata and kind if you like"
            )
        given = Document(**given)
    if not isinstance(given, Document):
        raise InvalidParameter(f"document {number} is {given!r:.60}; give a text or a document")
    if not given.text.strip():
        raise InvalidParameter(f"document {number} ({given.key!r:.60}) is empty; leave it out")
    return given


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _checked_queries(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str) or not isinstance(queries, Sequence) or len(queries) > MAX_QUERIES:
        raise InvalidParameter(f"queries must be a list of at most {MAX_QUERIES:,} texts")
    for query in queries:
        check_text("the query", query, MAX_QUERY_CHARS)
        if not query.strip():
            raise InvalidParameter("the query is empty; say what to look for")
    return list(queries)


def _settled(index: Retriever, wished: Chunking | None) -> Chunking:
    """The wished chunking, remembered for the next time; without one, what was wished before."""
    if wished is None:
        tokens, overlap = index.fact("chunk_tokens"), index.fact("chunk_overlap")
        return Chunking() if tokens is None else Chunking(int(tokens), int(overlap))
    if (wished.tokens, wished.overlap) != (index.fact("chunk_tokens"), index.fact("chunk_overlap")):
        index.set_facts({"chunk_tokens": wished.tokens, "chunk_overlap": wished.overlap})
    return wished


def _as_embedder(model: object) -> Embedder:
    from kvarn.llm import LLM

    if isinstance(model, str | LLM):
        return ModelEmbedder(model)
    return model  # type: ignore[return-value]


def _embedded(folder: Path, *, read_only: bool = False) -> Retriever:
    from kvarn.retrieval.embedded import EmbeddedIndex

    if not read_only:
        return EmbeddedIndex(folder)
    try:
        return EmbeddedIndex(folder, read_only=True)
    except StorageError:  # damaged: mend it, unless another process does or the folder forbids it
        return EmbeddedIndex(folder)


def _path(folder: str | PathLike[str] | None) -> Path | None:
    return None if folder is None else Path(folder)
