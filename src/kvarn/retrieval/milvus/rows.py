"""How chunks and facts lie in Milvus: the fields of both collections, a chunk to a row and back.

Terms are made here, as for the embedded store, so that BM25 sees the same words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from kvarn.errors import InvalidParameter
from kvarn.retrieval.extras import require
from kvarn.retrieval.storage.text_analysis import terms
from kvarn.retrieval.types import ChunkRecord, StoredChunk, TextChunk

HNSW = {"M": 16, "efConstruction": 128}
MAX_TEXT_BYTES = 65_535
CHUNK_FIELDS = ("key", "document", "ordinal", "start", "stop", "heading", "text", "source", "metadata")


def create_chunks(client: Any, name: str, dim: int) -> None:
    """A collection with one row per chunk."""
    pymilvus = require("pymilvus", "milvus")
    kinds = pymilvus.DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", kinds.INT64, is_primary=True)
    for field in ("version", "ordinal", "start", "stop"):
        schema.add_field(field, kinds.INT64)
    for field in ("document", "source", "heading", "digest", "text"):
        schema.add_field(field, kinds.VARCHAR, max_length=MAX_TEXT_BYTES)
    schema.add_field("terms", kinds.VARCHAR, max_length=MAX_TEXT_BYTES, enable_analyzer=True)
    schema.add_field("metadata", kinds.JSON)
    schema.add_field("vector", kinds.FLOAT_VECTOR, dim=dim)
    schema.add_field("sparse", kinds.SPARSE_FLOAT_VECTOR)
    schema.add_function(
        pymilvus.Function(
            name="bm25",
            function_type=pymilvus.FunctionType.BM25,
            input_field_names=["terms"],
            output_field_names=["sparse"],
        )
    )
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="HNSW", metric_type="IP", params=HNSW)
    bm25 = {"bm25_k1": 1.2, "bm25_b": 0.75}
    indexes.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25", params=bm25)
    client.create_collection(name, schema=schema, index_params=indexes, consistency_level="Strong")


def create_facts(client: Any, name: str) -> None:
    """A small collection of names and values; Milvus wants a vector in every collection."""
    kinds = require("pymilvus", "milvus").DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("name", kinds.VARCHAR, max_length=256, is_primary=True)
    schema.add_field("value", kinds.JSON)
    schema.add_field("vector", kinds.FLOAT_VECTOR, dim=2)
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=indexes, consistency_level="Strong")


def rows_of(entry: ChunkRecord, version: int) -> Iterator[dict[str, Any]]:
    """One row per chunk, written by the change of that version."""
    for ordinal, (piece, vector) in enumerate(zip(entry.pieces, entry.vectors, strict=True)):
        words = " ".join(terms(piece.searchable))
        if max(len(piece.text.encode()), len(words.encode())) > MAX_TEXT_BYTES:
            raise InvalidParameter(f"a chunk of {entry.id!r:.60} is longer than Milvus stores; use smaller chunks")
        yield {
            "key": _key(entry.id, ordinal, version),
            "version": version,
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


def _key(document: str, ordinal: int, version: int) -> int:
    """63 bits of a hash; a new version of a chunk never overwrites an old one."""
    digest = hashlib.sha256(f"{version}\0{ordinal}\0{document}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def chunk_of(row: Mapping[str, Any]) -> StoredChunk:
    """A chunk from the fields CHUNK_FIELDS."""
    piece = TextChunk(row["text"], row["start"], row["stop"], row["heading"])
    return StoredChunk(row["key"], row["document"], row["ordinal"], piece, row["source"], row["metadata"])
