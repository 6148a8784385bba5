"""The schema of the Milvus collection of chunks; chunks to rows and back.

Text is analysed here, as for the embedded index, so that BM25 sees the same terms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvarn.errors import InvalidParameter
from kvarn.retrieval.extras import require
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.text_analysis import terms
from kvarn.retrieval.types import EmbeddedDocument, StoredChunk, TextChunk

HNSW = {"M": 16, "efConstruction": 128}
MAX_TEXT_BYTES = 65_535
STONE = "kvarngone"  # BM25 needs a word
PLACE = "$place"  # in the metadata, where no document has a $: first line, last line, page of a chunk
STORED = ("ordinal", "start", "stop", "heading", "text", "source", "digest", "metadata", "terms", "vector", "num_bytes")
CHUNK_FIELDS = ("key", "document", "ordinal", "start", "stop", "heading", "text", "source", "metadata")


def create_chunks(connection: MilvusConnection, name: str, dim: int, between: Callable[[], object]) -> None:
    """Create a collection with one row per chunk. between: called between the steps, each of which may take seconds."""
    connection.create_collection(name, schema=_schema(connection, dim), consistency_level="Strong")
    between()
    indexes = connection.index_params()
    indexes.add_index("vector", index_type="HNSW", metric_type="IP", params=HNSW)
    bm25 = {"bm25_k1": 1.2, "bm25_b": 0.75}
    indexes.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25", params=bm25)
    connection.create_index(name, indexes)
    between()
    connection.load_collection(name)
    between()


def _schema(connection: MilvusConnection, dim: int) -> Any:
    pymilvus = require("pymilvus", "milvus")
    kinds = pymilvus.DataType
    schema = connection.schema()
    schema.add_field("key", kinds.INT64, is_primary=True)
    for field in ("version", "ordinal", "start", "stop", "num_bytes"):
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
    return schema


def rows_of(document: EmbeddedDocument, version: int) -> Iterator[dict[str, Any]]:
    """One row per chunk, written by the change of that version."""
    for ordinal, (chunk, vector) in enumerate(zip(document.chunks, document.vectors, strict=True)):
        words = " ".join(terms(chunk.named(document.source)))
        if max(len(chunk.text.encode()), len(words.encode())) > MAX_TEXT_BYTES:
            raise InvalidParameter(
                f"a chunk of {document.id!r:.60} is longer than Milvus stores; use smaller chunks", field="documents"
            )
        row = {
            "ordinal": ordinal,
            "start": chunk.start,
            "stop": chunk.end,
            "heading": chunk.heading,
            "text": chunk.text,
            "source": document.source,
            "digest": document.digest.hex(),
            "metadata": {**document.metadata, PLACE: [*(chunk.lines or (None, None)), chunk.page]},
            "terms": words,
            "vector": vector.tolist(),
        }
        yield _placed(row | {"num_bytes": _num_bytes(row)}, document.id, version)


def _placed(row: Mapping[str, Any], document: str, version: int) -> dict[str, Any]:
    """A row as one of that document and version."""
    return {**row, "key": _key(document, row["ordinal"], version), "document": document, "version": version}


def renamed(row: Mapping[str, Any], name: str, version: int) -> dict[str, Any]:
    """A row of a document that has got another id and source."""
    chunk = TextChunk(row["text"], row["start"], row["stop"], row["heading"])
    fields = {**{field: row[field] for field in STORED}, "source": name, "terms": " ".join(terms(chunk.named(name)))}
    return _placed(fields | {"num_bytes": _num_bytes(fields)}, name, version)


def gravestone(document: str, version: int, dim: int) -> dict[str, Any]:
    """A row that tells that the version has removed a document, until its rows are gone; never found."""
    row = {
        **dict.fromkeys(("start", "stop", "num_bytes"), 0),
        **dict.fromkeys(("source", "heading", "digest", "text"), ""),
        "ordinal": -1,
        "metadata": {},
        "terms": STONE,
        "vector": [1.0] + [0.0] * (dim - 1),
    }
    return _placed(row, document, version)


def _num_bytes(row: Mapping[str, Any]) -> int:
    """What a row holds; its indexes come on top."""
    texts = sum(len(row[name].encode()) for name in ("text", "terms", "heading", "source"))
    return texts + len(json.dumps(row["metadata"])) + 4 * len(row["vector"])


def _key(document: str, ordinal: int, version: int) -> int:
    """63 bits of a hash; a new version of a chunk never overwrites the old one."""
    digest = hashlib.sha256(f"{version}\0{ordinal}\0{document}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def chunk_of(row: Mapping[str, Any]) -> StoredChunk:
    """A chunk from the fields CHUNK_FIELDS."""
    first, last, page = row["metadata"].get(PLACE, (None, None, None))
    lines = None if first is None else (first, last)
    chunk = TextChunk(row["text"], row["start"], row["stop"], row["heading"], lines, page)
    return StoredChunk(row["key"], row["document"], row["ordinal"], chunk, row["source"], metadata_of(row))


def metadata_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a row's document, without what is Kvarn's own in that field."""
    return {name: value for name, value in row["metadata"].items() if name != PLACE}
