"""The ChunkStore on Milvus: rows of chunks, values about the collection, and which rows are valid.

One row per chunk and version; what a crash or a lost connection leaves behind is never seen (commits.py). Knows rows
and versions; knows no queries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvarn.errors import CollectionNotFound, StorageError
from kvarn.retrieval.milvus.commits import VersionRecord, last_commit
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.milvus.expressions import listed
from kvarn.retrieval.milvus.facts import CollectionFacts
from kvarn.retrieval.milvus.names import chunks_name, facts_name
from kvarn.retrieval.milvus.rows import CHUNK_FIELDS, STORED, chunk_of, create_chunks, metadata_of
from kvarn.retrieval.types import Float32, StoredChunk

BATCH = 500  # rows of one call
FORMAT = 3


class MilvusStore:
    """Two Milvus collections: one of chunks, one of values about them. dim is None before the first chunk."""

    def __init__(self, connection: MilvusConnection, name: str, tenant: str = "", *, must_exist: bool = False) -> None:
        self.client = connection
        self.name = chunks_name(name, tenant)
        self.facts = CollectionFacts(connection, facts_name(name, tenant))
        if must_exist and not self.facts.exists:
            raise CollectionNotFound(f"there is no collection {name!r} on Milvus at {connection.uri}")
        self.facts.open()
        self._dim: int | None = None
        self.commit()

    @property
    def dim(self) -> int | None:
        """Length of the vectors; of an empty collection another process may have begun to fill it meanwhile."""
        if self._dim is None:
            self._learn(self.facts.read())
        return self._dim

    def chunks(self, keys: Sequence[int]) -> Mapping[int, StoredChunk]:
        """Chunks by key; removed ones are left out."""
        return {row["key"]: chunk_of(row) for row in self._by_key(keys, CHUNK_FIELDS)}

    def vectors(self, keys: Sequence[int]) -> Mapping[int, Float32]:
        """Vectors by key of their chunk."""
        return {row["key"]: np.asarray(row["vector"], np.float32) for row in self._by_key(keys, ("key", "vector"))}

    def terms(self, keys: Sequence[int]) -> dict[int, str]:
        """The terms of chunks by key, in the order of their text, with spaces between them."""
        return {row["key"]: row["terms"] for row in self._by_key(keys, ("key", "terms"))}

    def sample(self, count: int) -> Float32:
        """Vectors of the valid chunks with the lowest keys, which are hashes; (n, dim)."""
        if self.dim is None:
            return np.empty((0, 0), np.float32)
        fields = ["key", "vector"]
        rows = self.client.query(self.name, filter=self.visible(), output_fields=fields, limit=count)
        ordered = sorted(rows, key=lambda row: row["key"])
        return np.asarray([row["vector"] for row in ordered], np.float32).reshape(-1, self.dim)

    def digests(self, document_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Content hashes of those documents that are stored."""
        found = self._first_chunks("document", list(document_ids))
        return {row["document"]: bytes.fromhex(row["digest"]) for row in found}

    def owners(self, digests: Sequence[bytes]) -> Mapping[bytes, str]:
        """Ids of the documents that have these content hashes."""
        found = self._first_chunks("digest", [digest.hex() for digest in digests])
        return {bytes.fromhex(row["digest"]): row["document"] for row in found}

    def files_below(self, folder: str) -> Mapping[str, bytes]:
        """Content hashes of the documents that are files below a folder: their id is their source."""
        prefix = folder.rstrip("/") + "/"
        rows = self.rows(("document", "source", "digest"))
        is_file = {row["document"]: row["digest"] for row in rows if row["document"] == row["source"]}
        return {id_: bytes.fromhex(digest) for id_, digest in is_file.items() if id_.startswith(prefix)}

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""
        folder = source.rstrip("/") + "/"
        sources = {row["document"]: row["source"] for row in self.rows(("document", "source"))}
        return sorted(id_ for id_, one in sources.items() if one == source or one.startswith(folder))

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        rows = self.rows(("document", "source", "metadata"))
        counts = Counter(row["document"] for row in rows)
        fields = {row["document"]: (row["source"], metadata_of(row)) for row in rows}
        return [
            {"id": id_, "source": source, "metadata": metadata, "chunks": counts[id_]}
            for id_, (source, metadata) in sorted(fields.items())
        ]

    def meta(self, name: str, default: Any = None) -> Any:
        """A value about the whole collection."""
        return self.facts.read().get(name, default)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Store values about the whole collection."""
        self.facts.write(values)

    def commit(self) -> VersionRecord:
        """The record of the last complete change."""
        facts = self.facts.read()
        self._learn(facts)
        return last_commit(facts)

    def visible(self, commit: VersionRecord | None = None) -> str:
        """A filter for the valid rows: of a complete change, and not replaced by the last one."""
        commit = commit or self.commit()
        conditions = [f"version <= {commit.version}", "ordinal >= 0"]
        if void := [version for version in commit.void if version < commit.version]:
            conditions.append(f"version not in {json.dumps(void)}")
        if commit.is_replacing:
            documents = listed(self.documents_of(commit))
            conditions.append(f"not (version < {commit.version} and document in {documents})")
        return "(" + " and ".join(conditions) + ")"

    def documents_of(self, commit: VersionRecord) -> list[str]:
        """Ids of the documents that a change has written."""
        return sorted({row["document"] for row in self.rows(("document",), f"version == {commit.version}")})

    def rows(self, fields: Sequence[str], expression: str = "") -> list[Any]:
        """All rows that match a filter expression; the valid ones by default."""
        if self.dim is None:
            return []
        rows: list[Any] = []
        condition = expression or self.visible()
        pages = self.client.query_iterator(self.name, filter=condition, output_fields=list(fields), batch_size=1000)
        with self.client.errors():
            while page := pages.next():
                rows += page
            pages.close()
        return rows

    def whole(self, documents: Sequence[str]) -> list[Any]:
        """All fields of the valid rows of some documents."""
        return self._of(documents, (*STORED, "document"))

    def num_bytes_of(self, documents: Sequence[str]) -> dict[str, int]:
        """How much the valid rows of those documents hold that are stored."""
        total: Counter[str] = Counter()
        for row in self._of(documents, ("document", "num_bytes")):
            total[row["document"]] += row["num_bytes"]
        return dict(total)

    def create(self, dim: int, between: Callable[[], object]) -> None:
        """Create the collection of chunks; its dimension is stored last and marks it as complete."""
        self.client.drop_collection(self.name)  # a crash may have left one without a dimension or an index
        between()
        create_chunks(self.client, self.name, dim, between)
        self.set_meta({"format": FORMAT})
        self.set_meta({"dim": dim})
        self._dim = dim

    def _learn(self, facts: Mapping[str, Any]) -> None:
        if self._dim is not None or facts.get("dim") is None:
            return
        if facts.get("format") != FORMAT:
            raise StorageError(
                f"{self.name!r} was written by another version of Kvarn; drop it, and index the documents again"
            )
        self.client.load_collection(self.name)
        self._dim = int(facts["dim"])

    def _of(self, documents: Sequence[str], fields: Sequence[str]) -> list[Any]:
        rows: list[Any] = []
        visible = self.visible()
        for start in range(0, len(documents), BATCH):
            rows += self.rows(fields, f"{visible} and document in {listed(documents[start : start + BATCH])}")
        return rows

    def _by_key(self, keys: Sequence[int], fields: Sequence[str]) -> list[Any]:
        rows: list[Any] = []
        for start in range(0, len(keys) if self.dim is not None else 0, BATCH):
            expression = f"key in {json.dumps(list(keys[start : start + BATCH]))}"
            rows += self.client.query(self.name, filter=expression, output_fields=list(fields))
        return rows

    def _first_chunks(self, field: str, values: list[str]) -> list[Any]:
        """Document and digest of the first chunk of each document whose field has one of the values."""
        rows: list[Any] = []
        visible = self.visible() if values and self.dim is not None else ""
        for start in range(0, len(values) if visible else 0, BATCH):
            expression = f"{visible} and ordinal == 0 and {field} in {listed(values[start : start + BATCH])}"
            rows += self.client.query(self.name, filter=expression, output_fields=["document", "digest"])
        return rows
