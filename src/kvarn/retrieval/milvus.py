"""Documents in Milvus: the same contract over a cluster by its URL, or over a local file by milvus-lite.

One row per chunk. A changed document's new chunks are written first and its old ones removed after: a crash between the
two leaves both, never neither, and the next add of the document removes what is left. Terms are made here, as for the
embedded store, so that BM25 sees the same words.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvarn.errors import InvalidParameter, RetrievalError, StorageError
from kvarn.retrieval.analyse import terms
from kvarn.retrieval.extras import require
from kvarn.retrieval.filters import AllOf, AnyOf, Compare, Condition, Exists, Not
from kvarn.retrieval.types import MAX_K, Entry, Float32, Piece, Scored, StoredChunk

COMPARISONS = {"eq": "==", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
HNSW = {"M": 16, "efConstruction": 128}
EXPANSION_SEARCH = 96
MAX_TEXT_BYTES = 65_535
BATCH = 500  # rows of one call
_CHUNK = ("key", "document", "ordinal", "start", "stop", "heading", "text", "source", "metadata")


class MilvusIndex:
    """A Retriever on Milvus. uri: http://host:19530, or a path that ends in .db."""

    def __init__(self, uri: str, name: str, *, token: str = "") -> None:
        self._pymilvus = require("pymilvus", "milvus")
        self._name = f"kvarn_{name.replace('-', '_').replace('.', '_')}"
        self._facts = f"{self._name}_facts"
        with _storage_errors():
            self._client = self._pymilvus.MilvusClient(uri, token=token)
            if not self._client.has_collection(self._facts):
                self._create_facts()
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
        rows = [row for entry in entries for row in _rows(entry)]
        self._require_dim({entry.vectors.shape[1] for entry in entries if len(entry.vectors)})
        with _storage_errors():
            for start in range(0, len(rows), BATCH):
                self._client.upsert(self._name, rows[start : start + BATCH])
            for entry in entries if self._dim is not None else ():
                stale = f"document == {_quoted(entry.id)} and ordinal >= {len(entry.pieces)}"
                self._client.delete(self._name, filter=stale)
        self._count_change()

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        known = list(self.digests(document_ids))
        with _storage_errors():
            for start in range(0, len(known), BATCH):
                self._client.delete(self._name, filter=f"document in {_listed(known[start : start + BATCH])}")
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
        return {row["key"]: _chunk(row) for row in self._by_key(keys, _CHUNK)}

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
            rows = self._client.query(self._facts, filter=f"name == {_quoted(name)}", output_fields=["value"])
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
                wanted = f"ordinal == 0 and {field} in {_listed(values[start : start + BATCH])}"
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
            self._create(int(self._dim or 0))
            self.set_facts({"dim": self._dim})

    def _create(self, dim: int) -> None:
        kinds, client = self._pymilvus.DataType, self._client
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", kinds.INT64, is_primary=True)
        for name in ("ordinal", "start", "stop"):
            schema.add_field(name, kinds.INT64)
        for name in ("document", "source", "heading", "digest", "text"):
            schema.add_field(name, kinds.VARCHAR, max_length=MAX_TEXT_BYTES)
        schema.add_field("terms", kinds.VARCHAR, max_length=MAX_TEXT_BYTES, enable_analyzer=True)
        schema.add_field("metadata", kinds.JSON)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=dim)
        schema.add_field("sparse", kinds.SPARSE_FLOAT_VECTOR)
        schema.add_function(
            self._pymilvus.Function(
                name="bm25",
                function_type=self._pymilvus.FunctionType.BM25,
                input_field_names=["terms"],
                output_field_names=["sparse"],
            )
        )
        indexes = client.prepare_index_params()
        indexes.add_index("vector", index_type="HNSW", metric_type="IP", params=HNSW)
        bm25 = {"bm25_k1": 1.2, "bm25_b": 0.75}
        indexes.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25", params=bm25)
        with _storage_errors():
            client.create_collection(self._name, schema=schema, index_params=indexes, consistency_level="Strong")

    def _create_facts(self) -> None:
        """A small collection of names and values; Milvus wants a vector in every collection."""
        kinds, client = self._pymilvus.DataType, self._client
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("name", kinds.VARCHAR, max_length=256, is_primary=True)
        schema.add_field("value", kinds.JSON)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=2)
        indexes = client.prepare_index_params()
        indexes.add_index("vector", index_type="FLAT", metric_type="IP")
        client.create_collection(self._facts, schema=schema, index_params=indexes, consistency_level="Strong")


def to_expression(condition: Condition) -> str:
    """A condition as Milvus writes it; a field that is not there makes a comparison false, not unknown."""
    match condition:
        case Compare(field, operator, value):
            compared = f"{_field(field)} {COMPARISONS[operator]} {_quoted(value)}"
            return f"({compared})" if field in ("id", "source") else f"(exists {_field(field)} and {compared})"
        case Exists(field):
            return "(key >= 0)" if field in ("id", "source") else f"(exists {_field(field)})"
        case Not(inner):
            return f"(not {to_expression(inner)})"
        case AllOf(conditions):
            return "(" + " and ".join(map(to_expression, conditions)) + ")"
        case AnyOf(conditions):
            return "(" + " or ".join(map(to_expression, conditions)) + ")"


def _field(name: str) -> str:
    return {"id": "document", "source": "source"}.get(name) or f"metadata[{_quoted(name)}]"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quoted, values)) + "]"


def _rows(entry: Entry) -> Iterator[dict[str, Any]]:
    for ordinal, (piece, vector) in enumerate(zip(entry.pieces, entry.vectors, strict=True)):
        words = " ".join(terms(piece.searchable))
        if max(len(piece.text.encode()), len(words.encode())) > MAX_TEXT_BYTES:
            raise InvalidParameter(f"a chunk of {entry.id!r:.60} is longer than Milvus stores; use smaller chunks")
        yield {
            "key": _key(entry.id, ordinal),
            "document": entry.id,
            "ordinal": ordinal,
            "start": piece.start,
            "stop": piece.end,
            "heading": piece.heading,
            "text": piece.text,
            "source": entry.source,
            "digest": entry.digest.hex(),
            "metadata": dict(entry.metadata),
            "terms": words,
            "vector": vector.tolist(),
        }


def _key(document: str, ordinal: int) -> int:
    """63 bits of a hash: the same chunk always has the same key."""
    digest = hashlib.sha256(f"{ordinal}\0{document}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _chunk(row: Mapping[str, Any]) -> StoredChunk:
    piece = Piece(row["text"], row["start"], row["stop"], row["heading"])
    return StoredChunk(row["key"], row["document"], row["ordinal"], piece, row["source"], row["metadata"])


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pymilvus", "grpc")):
            raise StorageError(f"Milvus: {' '.join(str(error).split())[:300]}") from error
        raise
