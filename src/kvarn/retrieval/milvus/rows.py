"""The schema of both Milvus collections, of chunks and of values about them; chunks to rows and back.

Text is analysed here, as for the embedded index, so that BM25 sees the same terms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from kvarn.errors import InvalidParameter
from kvarn.retrieval.extras import require
from kvarn.retrieval.text_analysis import terms
from kvarn.retrieval.types import EmbeddedDocument, StoredChunk, TextChunk

HNSW = {"M": 16, "efConstruction": 128}
MAX_TEXT_BYTES = 65_535
CHUNK_FIELDS = ("key", "document", "ordinal", "start", "stop", "heading", "text", "source", "metadata")


def create_chunks(client: Any, name: str, dim: int) -> None:
    """Create a collection with one row per chunk."""
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


def create_meta(client: Any, name: str) -> None:
    """Create a small collection of names and values; Milvus requires a vector in every collection."""
    kinds = require("pymilvus", "milvus").DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("name", kinds.VARCHAR, max_length=256, is_primary=True)
    schema.add_field("value", kinds.JSON)
    schema.add_field("vector", kinds.FLOAT_VECTOR, dim=2)
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=indexes, consistency_level="Strong")


def rows_of(document: EmbeddedDocument, version: int) -> Iterator[dict[str, Any]]:
    """One row per chunk, written by the change of that version."""
    for ordinal, (chunk, vector) in enumerate(zip(document.chunks, document.vectors, strict=True)):
        words = " ".join(terms(chunk.searchable))
        if max(len(chunk.text.encode()), len(words.encode())) > MAX_TEXT_BYTES:
            raise InvalidParameter(
                f"a chunk of {document.id!r:.60} is longer than Milvus stores; use smaller chunks", field="documents"
            )
        yield {
            "key": _key(document.id, ordinal, version),
            "version": version,
            "document": document.id,
            "ordinal": ordinal,
            "start": chunk.start,
            "stop": chunk.end,
            "heading": chunk.heading,
            "text": chunk.text,
            "source": document.source,
            "digest": document.digest.hex(),
            "metadata": dict(document.metadata),
            "terms": words,
            "vector": vector.tolist(),
        }


def _key(document: str, ordinal: int, version: int) -> int:
    """63 bits of a hash; a new version of a chunk never overwrites the old one."""
    digest = hashlib.sha256(f"{version}\0{ordinal}\0{document}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def chunk_of(row: Mapping[str, Any]) -> StoredChunk:
    """A chunk from the fields CHUNK_FIELDS."""
    chunk = TextChunk(row["text"], row["start"], row["stop"], row["heading"])
    return StoredChunk(row["key"], row["document"], row["ordinal"], chunk, row["source"], row["metadata"])
