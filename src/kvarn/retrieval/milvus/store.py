"""The ChunkStore on Milvus: rows of chunks, values about the collection, and which rows are valid.

One row per chunk and version; what a crash or a lost connection leaves behind is never seen (commits.py). Knows rows
and versions; knows no queries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.milvus.commits import SLOTS, VersionRecord, last_commit
from kvarn.retrieval.milvus.expressions import listed
from kvarn.retrieval.milvus.rows import CHUNK_FIELDS, chunk_of, create_chunks, create_meta
from kvarn.retrieval.types import Float32, StoredChunk

BATCH = 500  # rows of one call
FORMAT = 2


class MilvusStore:
    """Two Milvus collections: one of chunks, one of values about them. dim is None before the first chunk."""

    def __init__(self, uri: str, name: str, *, token: str = "") -> None:
        self.name = f"kvarn_{name.replace('-', '_').replace('.', '_')}"  # of the collection of chunks
        self.meta_name = f"{self.name}_facts"
        with storage_errors():
            self.client = require("pymilvus", "milvus").MilvusClient(uri, token=token)
            self._open_meta()
            self.dim: int | None = self.meta("dim")
            if self.dim is not None:
                self.client.load_collection(self.name)
        self._own: VersionRecord | None = None  # known without a query once this process has changed something
        self._require_format()

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        """Chunks by key; removed ones are left out."""
        return {row["key"]: chunk_of(row) for row in self._by_key(keys, CHUNK_FIELDS)}

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        """Vectors by key of their chunk."""
        return {row["key"]: np.asarray(row["vector"], np.float32) for row in self._by_key(keys, ("key", "vector"))}

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Content hashes of those documents that are stored."""
        found = self._first_chunks("document", list(document_ids))
        return {row["document"]: bytes.fromhex(row["digest"]) for row in found}

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        """Ids of the documents that have these content hashes."""
        found = self._first_chunks("digest", [digest.hex() for digest in digests])
        return {bytes.fromhex(row["digest"]): row["document"] for row in found}

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""
        folder = source.rstrip("/") + "/"
        sources = {row["document"]: row["source"] for row in self.rows(("document", "source"))}
        return sorted(id_ for id_, one in sources.items() if one == source or one.startswith(folder))

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        rows = self.rows(("document", "source", "metadata"))
        counts = Counter(row["document"] for row in rows)
        fields = {row["document"]: (row["source"], row["metadata"]) for row in rows}
        return [
            {"id": id_, "source": source, "metadata": metadata, "chunks": counts[id_]}
            for id_, (source, metadata) in sorted(fields.items())
        ]

    def meta(self, name: str, default: Any = None) -> Any:
        """A value about the whole collection."""
        return self._meta([name]).get(name, default)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Store values about the whole collection."""
        rows = [
            {
                "name": name,
                "value": {"bytes": value.hex()} if isinstance(value, bytes) else {"plain": value},
                "vector": [0.0, 0.0],
            }
            for name, value in values.items()
        ]
        with storage_errors():
            self.client.upsert(self.meta_name, rows)

    def commit(self) -> VersionRecord:
        """The record of the last complete change."""
        return self._own or last_commit(self._meta(SLOTS))

    def record(self, version: int, *, is_replacing: bool = False) -> None:
        """Make the rows up to a version valid."""
        commit = self.commit().after(version, is_replacing=is_replacing)
        self.set_meta(commit.meta())
        self._own = commit

    def reread_commit(self) -> None:
        """Ask Milvus for the last record again: one of ours may have failed after Milvus had stored it."""
        self._own = None

    def visible(self, commit: VersionRecord | None = None) -> str:
        """A filter for the valid rows: of a complete change, and not replaced by the last one."""
        commit = commit or self.commit()
        committed = f"version <= {commit.version}"
        if not commit.is_replacing:
            return f"({committed})"
        documents = listed(self.documents_of(commit))
        return f"({committed} and not (version < {commit.version} and document in {documents}))"

    def documents_of(self, commit: VersionRecord) -> list[str]:
        """Ids of the documents that a change has written."""
        return sorted({row["document"] for row in self.rows(("document",), f"version == {commit.version}")})

    def rows(self, fields: Sequence[str], expression: str = "") -> list[Any]:
        """All rows that match a filter expression; the valid ones by default."""
        if self.dim is None:
            return []
        rows: list[Any] = []
        with storage_errors():
            pages = self.client.query_iterator(
                self.name, filter=expression or self.visible(), output_fields=list(fields), batch_size=1000
            )
            while page := pages.next():
                rows += page
            pages.close()
        return rows

    def create(self, dim: int) -> None:
        """Create the collection of chunks; its dimension is stored last and marks it as complete."""
        with storage_errors():
            self.client.drop_collection(self.name)  # a crash may have left one without a dimension or an index
            create_chunks(self.client, self.name, dim)
        self.set_meta({"format": FORMAT})
        self.set_meta({"dim": dim})
        self.dim = dim

    def _by_key(self, keys: Sequence[int], fields: Sequence[str]) -> list[Any]:
        rows: list[Any] = []
        with storage_errors():
            for start in range(0, len(keys) if self.dim is not None else 0, BATCH):
                expression = f"key in {json.dumps(list(keys[start : start + BATCH]))}"
                rows += self.client.query(self.name, filter=expression, output_fields=list(fields))
        return rows

    def _first_chunks(self, field: str, values: list[str]) -> list[Any]:
        """Document and digest of the first chunk of each document whose field has one of the values."""
        rows: list[Any] = []
        visible = self.visible() if values else ""
        with storage_errors():
            for start in range(0, len(values) if self.dim is not None else 0, BATCH):
                expression = f"{visible} and ordinal == 0 and {field} in {listed(values[start : start + BATCH])}"
                rows += self.client.query(self.name, filter=expression, output_fields=["document", "digest"])
        return rows

    def _open_meta(self) -> None:
        if self.client.has_collection(self.meta_name) and not self.client.list_indexes(self.meta_name):
            self.client.drop_collection(self.meta_name)  # a crash interrupted its creation: it is empty
        if not self.client.has_collection(self.meta_name):
            create_meta(self.client, self.meta_name)
        self.client.load_collection(self.meta_name)  # after a restart it is on disk only

    def _meta(self, names: Sequence[str]) -> dict[str, Any]:
        expression = f"name in {listed(names)}"
        with storage_errors():
            rows = self.client.query(self.meta_name, filter=expression, output_fields=["name", "value"])
        values = {row["name"]: row["value"] for row in rows}
        return {name: bytes.fromhex(v["bytes"]) if "bytes" in v else v["plain"] for name, v in values.items()}

    def _require_format(self) -> None:
        if self.dim is not None and self.meta("format") != FORMAT:
            raise StorageError(
                f"{self.name!r} was written by another version of Kvarn; drop it, and index the documents again"
            )


@contextmanager
def storage_errors() -> Iterator[None]:
    """Errors of Milvus and its transport as StorageError."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pymilvus", "grpc")):
            raise StorageError(f"Milvus: {' '.join(str(error).split())[:300]}") from error
        raise
