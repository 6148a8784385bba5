"""A Retriever on Milvus.

One row per chunk and version. What a crash or a lost connection leaves behind is never seen (commits.py) and is removed
before the next change. One process changes a collection at a time; Milvus has no lock to enforce it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvarn.errors import RetrievalError, StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.filters import Condition
from kvarn.retrieval.milvus.commits import PLACES, VersionRecord, last_commit
from kvarn.retrieval.milvus.expressions import listed, to_expression
from kvarn.retrieval.milvus.rows import CHUNK_FIELDS, chunk_of, create_chunks, create_facts, rows_of
from kvarn.retrieval.storage.text_analysis import terms
from kvarn.retrieval.types import MAX_K, ChunkRecord, Float32, Scored, StoredChunk

EXPANSION_SEARCH = 96
BATCH = 500  # rows of one call
MAX_LOOKS = 3  # at rows that are being replaced
FORMAT = 2


class MilvusIndex:
    """A Retriever on Milvus. uri: http://host:19530, or a path that ends in .db."""

    def __init__(self, uri: str, name: str, *, token: str = "") -> None:
        self._name = f"kvarn_{name.replace('-', '_').replace('.', '_')}"
        self._facts = f"{self._name}_facts"
        with _storage_errors():
            self._client = require("pymilvus", "milvus").MilvusClient(uri, token=token)
            self._open_facts()
            self._dim = self.fact("dim")
            if self._dim is not None:
                self._client.load_collection(self._name)
        self._own: VersionRecord | None = None  # known without asking once this process has changed something
        self._is_clean = False  # nothing incomplete is left, by an earlier process or a failed change of ours
        self._require_format()

    @property
    def version(self) -> int:
        return self._commit().version

    @property
    def num_chunks(self) -> int:
        if self._dim is None:
            return 0
        with _storage_errors():
            rows = self._client.query(self._name, filter=self._visible(), output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    @property
    def dim(self) -> int | None:
        return None if self._dim is None else int(self._dim)

    def put(self, entries: Sequence[ChunkRecord]) -> None:
        """Add or replace documents: after a crash all of them are there, or none."""
        self._require_dim({entry.vectors.shape[1] for entry in entries if len(entry.vectors)})
        with self._changing() as version:
            rows = [row for entry in entries for row in rows_of(entry, version)]
            replaced = list(self.digests([entry.id for entry in entries]))
            for start in range(0, len(rows), BATCH):
                self._client.insert(self._name, rows[start : start + BATCH])
            self._record(version, is_replacing=bool(replaced))
            if replaced:
                self._delete(replaced, version)
                self._record(version)

    def remove(self, document_ids: Sequence[str]) -> int:
        """Remove documents; returns how many were there."""
        known = list(self.digests(document_ids))
        with self._changing() as version:
            self._delete(known, version)
            self._record(version)
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
        return self._known_facts([name]).get(name, default)

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
        wanted = "" if where is None else f" and {to_expression(where)}"
        for _ in range(MAX_LOOKS):
            commit = self._commit()
            with _storage_errors():
                (found,) = self._client.search(
                    self._name,
                    data=[query],
                    anns_field=field,
                    limit=min(k, MAX_K),
                    filter=self._visible(commit) + wanted,
                    search_params=params,
                )
            if self._commit() == commit:  # else rows that were visible may have been removed while we looked
                break
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
        visible = self._visible() if values else ""
        with _storage_errors():
            for start in range(0, len(values) if self._dim is not None else 0, BATCH):
                wanted = f"{visible} and ordinal == 0 and {field} in {listed(values[start : start + BATCH])}"
                rows += self._client.query(self._name, filter=wanted, output_fields=["document", "digest"])
        return rows

    def _all(self, fields: Sequence[str], wanted: str = "") -> list[Any]:
        if self._dim is None:
            return []
        rows: list[Any] = []
        with _storage_errors():
            pages = self._client.query_iterator(
                self._name, filter=wanted or self._visible(), output_fields=list(fields), batch_size=1000
            )
            while page := pages.next():
                rows += page
            pages.close()
        return rows

    def _open_facts(self) -> None:
        if self._client.has_collection(self._facts) and not self._client.list_indexes(self._facts):
            self._client.drop_collection(self._facts)  # a crash cut its making short: nothing was in it yet
        if not self._client.has_collection(self._facts):
            create_facts(self._client, self._facts)
        self._client.load_collection(self._facts)  # after a restart it lies on the disk only

    def _known_facts(self, names: Sequence[str]) -> dict[str, Any]:
        with _storage_errors():
            rows = self._client.query(self._facts, filter=f"name in {listed(names)}", output_fields=["name", "value"])
        values = {row["name"]: row["value"] for row in rows}
        return {name: bytes.fromhex(v["bytes"]) if "bytes" in v else v["plain"] for name, v in values.items()}

    def _commit(self) -> VersionRecord:
        return self._own or last_commit(self._known_facts(PLACES))

    def _record(self, version: int, *, is_replacing: bool = False) -> None:
        """Let the rows up to a version count, from now on."""
        commit = self._commit().after(version, is_replacing=is_replacing)
        self.set_facts(commit.fact())
        self._own = commit

    def _visible(self, commit: VersionRecord | None = None) -> str:
        """The rows that count: complete, and not replaced by the last change."""
        commit = commit or self._commit()
        written = f"version <= {commit.version}"
        if not commit.is_replacing:
            return f"({written})"
        return f"({written} and not (version < {commit.version} and document in {listed(self._written_by(commit))}))"

    def _written_by(self, commit: VersionRecord) -> list[str]:
        """The documents of one change."""
        return sorted({row["document"] for row in self._all(("document",), f"version == {commit.version}")})

    def _delete(self, documents: Sequence[str], before: int) -> None:
        """Remove the rows that documents had before a version."""
        for start in range(0, len(documents), BATCH):
            part = listed(documents[start : start + BATCH])
            self._client.delete(self._name, filter=f"version < {before} and document in {part}")

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """One change, under the version it is given; first, remove what an incomplete one has left behind."""
        with _storage_errors():
            if not self._is_clean:
                self._own = None  # ours may have failed after Milvus had taken it
                self._clean()
            self._is_clean = False
            yield self._commit().version + 1
            self._is_clean = True

    def _clean(self) -> None:
        if self._dim is None:
            return
        commit = self._commit()
        self._client.delete(self._name, filter=f"version > {commit.version}")
        if commit.is_replacing:
            self._delete(self._written_by(commit), commit.version)
            self._record(commit.version)

    def _require_format(self) -> None:
        if self._dim is not None and self.fact("format") != FORMAT:
            raise StorageError(
                f"{self._name!r} was written by another version of Kvarn; drop it, and index the documents again"
            )

    def _require_dim(self, dims: set[int]) -> None:
        known = dims | ({self.dim} - {None})
        if len(known) > 1:
            shown = " and ".join(map(str, sorted(filter(None, known))))
            raise RetrievalError(f"vectors of {shown} dimensions cannot be in one collection; embed with its own model")
        if self._dim is None and known:
            self._create(int(known.pop() or 0))

    def _create(self, dim: int) -> None:
        """Make the collection of chunks; the fact that it has a dimension comes last and says that it is whole."""
        with _storage_errors():
            self._client.drop_collection(self._name)  # a crash may have left one without that fact, or without an index
            create_chunks(self._client, self._name, dim)
        self.set_facts({"format": FORMAT})
        self.set_facts({"dim": dim})
        self._dim = dim


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pymilvus", "grpc")):
            raise StorageError(f"Milvus: {' '.join(str(error).split())[:300]}") from error
        raise
