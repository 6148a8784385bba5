"""Changes of a document store's rows, within a transaction of its caller. Knows SQL; knows no files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.retrieval.types import EmbeddedDocument, TextChunk

PLACE_COLUMNS = ("first_line", "last_line", "page")
CHUNK_COLUMNS = ("text", "start", "stop", "heading", *PLACE_COLUMNS)


def insert_document(cursor: sqlite3.Cursor, document: EmbeddedDocument, version: int) -> None:
    """Add a document and its chunks."""
    metadata = json.dumps(dict(document.metadata), ensure_ascii=False, sort_keys=True)
    cursor.execute(
        "INSERT INTO documents (id, source, digest, metadata) VALUES (?, ?, ?, ?)",
        (document.id, document.source, document.digest, metadata),
    )
    key = cursor.lastrowid
    cursor.executemany(
        f"INSERT INTO chunks (document, ordinal, version, vector, {', '.join(CHUNK_COLUMNS)})"
        f" VALUES (?, ?, ?, ?{', ?' * len(CHUNK_COLUMNS)})",
        [
            (key, ordinal, version, vector.tobytes(), *_columns(chunk))
            for ordinal, (chunk, vector) in enumerate(zip(document.chunks, document.vectors, strict=True))
        ],
    )


def remove_documents(cursor: sqlite3.Cursor, document_ids: Sequence[str], version: int) -> int:
    """Remove documents, and remember their chunks for the indexes; returns how many were there."""
    num_removed = 0
    for document_id in document_ids:
        row = cursor.execute("SELECT key FROM documents WHERE id = ?", (document_id,)).fetchone()
        if row is None:
            continue
        _remember_removed(cursor, row[0], version)
        cursor.execute("DELETE FROM chunks WHERE document = ?", row)
        cursor.execute("DELETE FROM documents WHERE key = ?", row)
        num_removed += 1
    return num_removed


def rename_documents(cursor: sqlite3.Cursor, moves: Mapping[str, str], version: int) -> None:
    """Give documents new ids and sources; those that have them and are not renamed themselves are removed.

    Their chunks are removed and added as far as the indexes know, which have the words of the names.
    """
    remove_documents(cursor, [new for new in moves.values() if new not in moves], version)
    keys = {old: cursor.execute("SELECT key FROM documents WHERE id = ?", (old,)).fetchone() for old in moves}
    for row in keys.values():  # out of each other's way first: two may have changed places
        if row is not None:
            cursor.execute("UPDATE documents SET id = ? WHERE key = ?", (f"\0{row[0]}", row[0]))
    for old, row in keys.items():
        if row is not None:
            cursor.execute("UPDATE documents SET id = ?, source = ? WHERE key = ?", (moves[old], moves[old], row[0]))
            _remember_removed(cursor, row[0], version)
            cursor.execute("UPDATE chunks SET version = ? WHERE document = ?", (version, row[0]))


def _remember_removed(cursor: sqlite3.Cursor, document: int, version: int) -> None:
    sql = "INSERT OR REPLACE INTO removed SELECT key, ? FROM chunks WHERE document = ?"
    cursor.execute(sql, (version, document))


def add_place_columns(cursor: sqlite3.Cursor) -> None:
    """Give a store that was made before chunks had lines and pages the columns for them."""
    if not has_place_columns(cursor):
        for name in PLACE_COLUMNS:
            cursor.execute(f"ALTER TABLE chunks ADD COLUMN {name} INTEGER")


def has_place_columns(cursor: sqlite3.Cursor) -> bool:
    """Whether a store knows lines and pages; one that is opened for reading may not."""
    return PLACE_COLUMNS[-1] in {row[1] for row in cursor.execute("PRAGMA table_info(chunks)")}


def text_chunk(columns: Sequence[Any]) -> TextChunk:
    """A chunk from its CHUNK_COLUMNS."""
    text, start, stop, heading, first_line, last_line, page = columns
    lines = None if first_line is None else (first_line, last_line)
    return TextChunk(text, start, stop, heading, lines, page)


def _columns(chunk: TextChunk) -> Sequence[Any]:
    lines = chunk.lines or (None, None)
    return chunk.text, chunk.start, chunk.end, chunk.heading, *lines, chunk.page
