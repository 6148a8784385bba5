"""A Retriever on Milvus.

One row per chunk. A changed document's new chunks are written first and its old ones removed after: a crash between the
two leaves both, never neither, and the next add of the document removes what is left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvarn.errors import RetrievalError, StorageError
from kvarn.retrieval.analyse import terms
from kvarn.retrieval.extras import require
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.milvus.expressions import listed, quoted, to_expression
from kvarn.retrieval.milvus.rows import CHUNK_FIELDS, chunk_of, create_chunks, create_facts, rows_of
from kvarn.retrieval.types import MAX_K, Entry, Float32, Scored, StoredChunk

EXPANSION_SEARCH = 96
BATCH = 500  # rows of one call


class MilvusIndex:
    """A Retriever on Milvus. uri: http://host:19530, or a path that ends in .db."""

    def __init__(self, uri: str, name: str, *, token: str = "") -> None:
        self._name = f"kvarn_{name.replace('-', '_').replace('.', '_')}"
        self._facts = f"{self._name}_facts"
        with _storage_errors():
            self._client = require("pymilvus", "milvus").MilvusClient(uri, token=token)
            if not self._client.has_collection(self._facts):
                create_facts(self._client, self._facts)
        self._dim = self.fact("dim")

    @property
    def version(self) -> int:
        return int(self.fact("version", 0))

    @property
    def num_chunks(self) -> int:
        if self._dim is None:
            return 0
        with _storage_errors():
            rows = self._client.query(self._name, filter="", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    @property
    def dim(self) -> int | None:
        return None if self._dim is None else int(self._dim)

    def put(self, entries: Sequence[Entry]) -> None:
        """Add or replace documents."""
        rows = [row for entry in entries for row in rows_of(entry)]
        self._require_dim({entry.vectors.shape[1] for entry in entries if len(entry.vectors)})
        with _storage_errors():
            for start in range(0, len(rows), BATCH):
                self._client.upsert(self._name, rows[start : start + BATCH])
            for entry in entries if self._dim is not None else ():
                stale = f"document == {quoted(entry.id)} and ordinal >= {len(entry.pieces)}"
                self._client.delete(self._name, filter=stale)
        self._count_change()

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        known = list(self.digests(document_ids))
        with _storage_errors():
            for start in range(0, len(known), BATCH):
                self._client.delete(self._name, filter=f"document in {listed(known[start : start + BATCH])}")
        self._count_change()
        return len(known)

    def dense(self, vector: Float32, k: int, where: Condition | None) -> list[Scored]:
        """The k chunks nearest by cosine, best first."""
        if self._dim is None:
            return []
        if vector.shape != (self.dim,):
            raise RetrievalError(f"the query's vector has {vector.shape[-1]} dimensions, the collection's {self.dim}")
        params = {"params": {"ef": max(EXPANSION_SEARCH, k)}}
        return self._search("vector", vector.tolist(), k, where, params)

    def sparse(self, query: str, k: int, where: Condition | None) -> list[Scored]:
        """The k best chunks by BM25."""
        words = " ".join(terms(query))
        found = self._search("sparse", words, k, where, {}) if words and self._dim is not None else []
        # A cluster tells BM25 as it is, milvus-lite as a negative distance; it is never below 0.
        return sorted(((key, abs(score)) for key, score in found), key=lambda pair: (-pair[1], pair[0]))

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        return {row["key"]: chunk_of(row) for row in self._by_key(keys, CHUNK_FIELDS)}

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        return {row["key"]: np.asarray(row["vector"], np.float32) for row in self._by_key(keys, ("key", "vector"))}

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        found = self._firsts("document", list(document_ids))
        return {row["document"]: bytes.fromhex(row["digest"]) for row in found}

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        found = self._firsts("digest", [digest.hex() for digest in digests])
        return {bytes.fromhex(row["digest"]): row["document"] for row in found}

    def ids_from(self, source: str) -> list[str]:
        folder = source.rstrip("/") + "/"
        sources = {row["document"]: row["source"] for row in self._all(("document", "source"))}
        return sorted(id_ for id_, given in sources.items() if given == source or given.startswith(folder))

    def documents(self) -> list[dict[str, Any]]:
        rows = self._all(("document", "source", "metadata"))
        counts = Counter(row["document"] for row in rows)
        told = {row["document"]: (row["source"], row["metadata"]) for row in rows}
        return [
            {"id": id_, "source": source, "metadata": metadata, "chunks": counts[id_]}
            for id_, (source, metadata) in sorted(told.items())
        ]

    def fact(self, name: str, default: Any = None) -> Any:
        with _storage_errors():
            rows = self._client.query(self._facts, filter=f"name == {quoted(name)}", output_fields=["value"])
        if not rows:
            return default
        value = rows[0]["value"]
        return bytes.fromhex(value["bytes"]) if "bytes" in value else value["plain"]

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        rows = [
            {
                "name": name,
                "value": {"bytes": value.hex()} if isinstance(value, bytes) else {"plain": value},
                "vector": [0.0, 0.0],
            }
            for name, value in facts.items()
        ]
        with _storage_errors():
            self._client.upsert(self._facts, rows)

    def optimise(self) -> None:
        """Let Milvus merge its segments."""
        if self._dim is not None:
            with _storage_errors():
                self._client.compact(self._name)

    def drop(self) -> None:
        """Remove everything."""
        with _storage_errors():
            for name in (self._name, self._facts):
                self._client.drop_collection(name)

    def close(self) -> None:
        self._client.close()

    def _search(self, field: str, query: Any, k: int, where: Condition | None, params: dict[str, Any]) -> list[Scored]:
        with _storage_errors():
            (found,) = self._client.search(
                self._name,
                data=[query],
                anns_field=field,
                limit=min(k, MAX_K),
                filter="" if where is None else to_expression(where),
                search_params=params,
            )
        scored = [(int(hit["key"]), float(hit["distance"])) for hit in found]
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))

    def _by_key(self, keys: Sequence[int], fields: Sequence[str]) -> list[Any]:
        rows: list[Any] = []
        with _storage_errors():
            for start in range(0, len(keys) if self._dim is not None else 0, BATCH):
                wanted = f"key in {json.dumps(list(keys[start : start + BATCH]))}"
                rows += self._client.query(self._name, filter=wanted, output_fields=list(fields))
        return rows

    def _firsts(self, field: str, values: list[str]) -> list[Any]:
        """The first chunks of documents, found by a field."""
        rows: list[Any] = []
        with _storage_errors():
            for start in range(0, len(values) if self._dim is not None else 0, BATCH):
                wanted = f"ordinal == 0 and {field} in {listed(values[start : start + BATCH])}"
                rows += self._client.query(self._name, filter=wanted, output_fields=["document", "digest"])
        return rows

    def _all(self, fields: Sequence[str]) -> list[Any]:
        if self._dim is None:
            return []
        rows: list[Any] = []
        with _storage_errors():
            pages = self._client.query_iterator(self._name, filter="", output_fields=list(fields), batch_size=1000)
            while page := pages.next():
                rows += page
            pages.close()
        return rows

    def _count_change(self) -> None:
        self.set_facts({"version": self.version + 1})

    def _require_dim(self, dims: set[int]) -> None:
        known = dims | ({self.dim} - {None})
        if len(known) > 1:
            shown = " and ".join(map(str, sorted(filter(None, known))))
            raise RetrievalError(f"vectors of {shown} dimensions cannot be in one collection; embed with its own model")
        if self._dim is None and known:
            self._dim = known.pop()
            with _storage_errors():
                create_chunks(self._client, self._name, int(self._dim or 0))
            self.set_facts({"dim": self._dim})


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pymilvus", "grpc")):
            raise StorageError(f"Milvus: {' '.join(str(error).split())[:300]}") from error
        raise
