"""The Retriever on Milvus: changes that take effect as a whole, and searches over the valid rows.

One process changes a collection at a time, which a lease makes sure of; all others may search it meanwhile. What an
interrupted change leaves behind is removed before the next one. Knows queries and changes; rows and versions are
store.py's, who may change them is lease.py's.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from kvarn.errors import RetrievalError
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.milvus.commits import VersionRecord
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.milvus.expressions import listed, to_expression
from kvarn.retrieval.milvus.lease import LEASE_S, WriterLease
from kvarn.retrieval.milvus.phrases import NUM_READ, Phrase, with_phrases
from kvarn.retrieval.milvus.rows import gravestone, renamed, rows_of
from kvarn.retrieval.milvus.store import BATCH, MilvusStore
from kvarn.retrieval.scores import ChunkCandidates, Keys, Scales, Scores
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, bm25_limit, query_terms, quoted_phrases
from kvarn.retrieval.types import MAX_K, EmbeddedDocument, Float32, Scored

EXPANSION_SEARCH = 96
SAMPLED_CHUNKS = 256
MAX_ATTEMPTS = 3  # of a search whose rows are being replaced
WAIT_S = 1.5 * LEASE_S  # for another writer: longer than one that was killed keeps its lease


class MilvusIndex:
    """A Retriever on Milvus. uri: http://host:19530, or a path that ends in .db."""

    folder = None
    language = DEFAULT_LANGUAGE
    is_writable = True  # who may change it is decided anew for each change

    def __init__(
        self,
        uri: str | MilvusConnection,
        name: str,
        *,
        token: str = "",
        tenant: str = "",
        must_exist: bool = False,
        wait_s: float = WAIT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        """tenant: whose collection it is. wait_s: for another process that is changing it, before CollectionLocked.

        lease_s: after so long without a sign of life others may change the collection.
        """
        connection = uri if isinstance(uri, MilvusConnection) else MilvusConnection(uri, token)
        self._owned = None if isinstance(uri, MilvusConnection) else connection
        self.store = MilvusStore(connection, name, tenant, must_exist=must_exist)
        self._lease = WriterLease(self.store.facts, lease_s)
        self._wait_s = wait_s
        self._changing = threading.RLock()  # one thread of this process changes it
        self._record: VersionRecord | None = None  # the last, while this process is the writer
        self._sampled: tuple[int, Float32] | None = None  # version, mean vector

    @property
    def version(self) -> int:
        return self.store.commit().version

    @property
    def num_bytes(self) -> int:
        """What all valid rows hold; the indexes come on top."""
        return self.store.commit().num_bytes

    @property
    def num_chunks(self) -> int:
        if self.store.dim is None:
            return 0
        rows = self.store.client.query(self.store.name, filter=self.store.visible(), output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    @property
    def dim(self) -> int | None:
        return self.store.dim

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While the block runs no other process changes the collection; CollectionLocked if one goes on doing so."""
        with self._changing:
            if self._record is not None:
                yield
                return
            record, is_incomplete = self._lease.acquire(self._wait_s)
            try:
                self._record = self._completed(record) if is_incomplete else record
                yield
            finally:
                has_failed, self._record = self._record is None, None
                self._lease.release(has_failed=has_failed)

    def put(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        with self.writing():
            self._agree_on_dim({document.vectors.shape[1] for document in documents if len(document.vectors)})
            version = self._last.next_version
            self._replace([row for document in documents for row in rows_of(document, version)], ())

    def bulk(self) -> AbstractContextManager[None]:
        """Nothing is put off: Milvus builds its indexes by itself."""
        return nullcontext()

    def rename(self, moves: Mapping[str, str]) -> Mapping[str, str]:
        """Give documents new ids and sources, all or none: their rows are written anew, with the vectors they have."""
        with self.writing():
            rows = self.store.whole(list(moves)) if self.store.dim is not None else []
            version = self._last.next_version
            moved = {row["document"]: moves[row["document"]] for row in rows}
            if moved:
                named = [renamed(row, moves[row["document"]], version) for row in rows]
                self._replace(named, sorted(set(moved) - set(moved.values())))
        return moved

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents, all of them or none; returns how many were there."""
        with self.writing():
            known = sorted(self.store.digests(document_ids))
            if known:
                self._replace([], known)
        return len(known)

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k nearest chunks by cosine, best first."""
        if self.store.dim is None:
            return []
        if vector.shape != (self.dim,):
            raise RetrievalError(f"the query's vector has {vector.shape[-1]} dimensions, the collection's {self.dim}")
        params = {"params": {"ef": max(EXPANSION_SEARCH, k)}}
        return self._search("vector", vector.tolist(), k, where, params)

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25; phrases are looked for in the best by their words."""
        words, phrases = query_terms(query), quoted_phrases(query)
        if not words or self.store.dim is None:
            return []
        found = self._by_words(words, max(k, NUM_READ) if phrases else k, where)
        scored = with_phrases(found, phrases, self.store.terms, self._by_words)
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k]

    def candidates(self, query: str, vector: Float32, depth: int, where: Condition | None) -> ChunkCandidates:
        """The chunks that are among the best by meaning or by words, as many of each."""
        near, by_words = Scores.of(self.dense(vector, depth, where)), Scores.of(self.sparse(query, depth, where))
        max_other_cosine = float(near.values[-1]) if len(near) >= depth else 1.0
        max_other_bm25 = float(by_words.values[-1]) if len(by_words) >= depth else 0.0
        if max_other_bm25 and quoted_phrases(query):  # any other may have the phrase
            max_other_bm25 = math.inf
        return ChunkCandidates(near, by_words, max_other_cosine, max_other_bm25)

    def cosines(self, vector: Float32, keys: Keys) -> Scores:
        """Cosines of the given chunks; those that are not there any more are left out."""
        return Scores.of([(key, float(one @ vector)) for key, one in self.store.vectors(keys.tolist()).items()])

    def bm25(self, query: str, keys: Keys) -> Scores:
        """BM25 of the given chunks; those that share no term with the query are left out."""
        words = query_terms(query)
        found = self._by_words(words, len(keys), None, keys.tolist()) if len(keys) and words else []
        return Scores.of(with_phrases(found, quoted_phrases(query), self.store.terms, self._by_words))

    def scales(self, query: str, vector: Float32) -> Scales:
        """What the scores of a query are measured by; the sample of chunks is read once per version.

        Milvus does not tell how many chunks hold a word: the limit of BM25 is that of words each in one chunk only.
        """
        version = self.version
        cached = self._sampled
        if cached is None or cached[0] != version:
            sample = self.store.sample(SAMPLED_CHUNKS)
            cached = self._sampled = (version, sample.mean(axis=0) if len(sample) else np.zeros_like(vector))
        limit = bm25_limit([(1, count) for count in Counter(query_terms(query)).values()], self.num_chunks)
        return Scales(float(cached[1] @ vector), limit)

    def document_frequencies(self, terms: Sequence[str]) -> dict[str, int]:  # noqa: ARG002
        """Milvus does not tell: all words then weigh the same."""
        return {}

    def optimise(self) -> None:
        """Let Milvus merge its segments."""
        if self.store.dim is not None:
            self.store.client.compact(self.store.name)

    def drop(self) -> None:
        """Remove everything; from the first step on the collection does not exist."""
        for name in (self.store.facts.name, self.store.name):
            self.store.client.drop_collection(name)

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def _by_words(
        self, words: Phrase, k: int, where: Condition | None, keys: Sequence[int] | None = None
    ) -> list[Scored]:
        """A cluster reports BM25 as it is, milvus-lite as a negative distance; it is never below 0."""
        found = self._search("sparse", " ".join(words), k, where, {}, keys=keys)
        return [(key, abs(score)) for key, score in found]

    def _search(
        self,
        field: str,
        query: Any,
        k: int,
        where: Condition | None,
        params: dict[str, Any],
        *,
        keys: Sequence[int] | None = None,
    ) -> list[Scored]:
        """keys: only among these."""
        condition = "" if where is None else f" and {to_expression(where)}"
        condition += "" if keys is None else f" and key in {json.dumps(list(keys))}"
        for _ in range(MAX_ATTEMPTS):
            commit = self.store.commit()
            visible = self.store.visible(commit)
            (found,) = self.store.client.search(
                self.store.name,
                data=[query],
                anns_field=field,
                limit=min(k, MAX_K),
                filter=visible + condition,
                search_params=params,
            )
            if self.store.commit() == commit:  # else rows that were valid may have been removed during the search
                break
        scored = [(int(hit["key"]), float(hit["distance"])) for hit in found]
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))

    @property
    def _last(self) -> VersionRecord:
        assert self._record is not None
        return self._record

    def _replace(self, rows: Sequence[Mapping[str, Any]], removed: Sequence[str]) -> None:
        """One change, of the next version: write rows, and remove what their documents, and others, had before."""
        record = self._last
        self._record = None  # until it is complete
        assert self.store.dim is not None
        version = record.next_version
        documents = sorted({row["document"] for row in rows} | set(removed))
        before = self.store.num_bytes_of(documents)
        written = [*rows, *(gravestone(one, version, self.store.dim) for one in removed)]
        for start in range(0, len(written), BATCH):
            self._lease.require()
            self.store.client.insert(self.store.name, written[start : start + BATCH])
        num_bytes = record.num_bytes + sum(row["num_bytes"] for row in rows) - sum(before.values())
        if not before:
            self._record = self._recorded(record.after(self._lease.epoch, version, num_bytes=num_bytes))
            return
        replacing = record.after(self._lease.epoch, version, is_replacing=True, num_bytes=num_bytes)
        self._record = self._settled(self._recorded(replacing), documents)

    def _completed(self, record: VersionRecord) -> VersionRecord:
        """Remove what another writer has left behind: rows that were never recorded, and replaced ones."""
        if self.store.dim is None:
            return record
        last = record.version
        void = [version for version in record.void if version <= last]
        self._delete(f"version > {last}" + (f" or version in {json.dumps(void)}" if void else ""))
        return self._settled(record, self.store.documents_of(record)) if record.is_replacing else record

    def _settled(self, record: VersionRecord, documents: Sequence[str]) -> VersionRecord:
        """Remove the rows that the last change has replaced."""
        last = record.version
        for start in range(0, len(documents), BATCH):
            self._delete(f"version < {last} and document in {listed(documents[start : start + BATCH])}")
        self._delete(f"version == {last} and ordinal < 0")
        return self._recorded(record.after(self._lease.epoch, last, num_bytes=record.num_bytes))

    def _recorded(self, record: VersionRecord) -> VersionRecord:
        self._lease.require()
        self.store.facts.write(record.facts())
        self._lease.check()
        return record

    def _delete(self, expression: str) -> None:
        self._lease.require()
        self.store.client.delete(self.store.name, filter=expression)

    def _agree_on_dim(self, dims: set[int]) -> None:
        known = dims | ({self.dim} - {None})
        if len(known) > 1:
            shown = " and ".join(map(str, sorted(filter(None, known))))
            raise RetrievalError(f"vectors of {shown} dimensions cannot be in one collection; embed with its own model")
        if self.store.dim is None and known:
            self.store.create(int(known.pop() or 0), self._lease.require)
