"""The documents of one collection: texts, chunks and vectors in one SQLite file, a version for every change.

The source of truth: the search indexes are built from it and can always be rebuilt. Knows no HNSW and no BM25.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.errors import StorageError
from kvarn.retrieval.filters import Condition, to_sql
from kvarn.retrieval.storage.document_rows import (
    PLACE_COLUMNS,
    add_place_columns,
    has_place_columns,
    insert_document,
    remove_documents,
    rename_documents,
    text_chunk,
)
from kvarn.retrieval.types import EmbeddedDocument, Float32, StoredChunk

FILE = "truth.sqlite"  # not renamed: existing collections have it
FORMAT = 1
BUSY_TIMEOUT_S = 30.0
MAX_VARIABLES = 500  # in one statement
MAX_JOURNAL_BYTES = 4 << 20  # kept for the next changes, once those before are in the file
CACHE_KIB = 65_536  # of pages: a search reads a few hundred vectors from all over the file
# facts: values about the whole collection, see meta(). removed: chunks that an index may still hold.
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (
  key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, source TEXT NOT NULL, digest BLOB NOT NULL,
  metadata TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS documents_by_digest ON documents (digest);
CREATE TABLE IF NOT EXISTS chunks (
  key INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL, ordinal INTEGER NOT NULL, start INTEGER NOT NULL,
  stop INTEGER NOT NULL, heading TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL, version INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS chunks_by_document ON chunks (document);
CREATE INDEX IF NOT EXISTS chunks_by_version ON chunks (version);
CREATE TABLE IF NOT EXISTS removed (key INTEGER PRIMARY KEY, version INTEGER NOT NULL);
"""


class DocumentStore:
    """One SQLite file. Methods may be called from several threads; changes come from one process at a time."""

    def __init__(self, folder: Path, *, is_writable: bool) -> None:
        self._path = folder / FILE
        require_file(self._path)
        self._lock = threading.RLock()
        with _storage_errors(self._path):
            self._reader = _connect_reader(self._path) if not is_writable else _connect(self._path)
            self._writer = _connect(self._path) if is_writable else None
            if self._writer is not None:
                self._writer.executescript(_TABLES)
                add_place_columns(self._writer.cursor())
            self._place = ", ".join(PLACE_COLUMNS) if has_place_columns(self._reader.cursor()) else "NULL, NULL, NULL"
        self._reader_lock = threading.RLock()
        if self.meta("format", FORMAT) != FORMAT:
            raise StorageError(f"{self._path} was written by another version of Kvarn; index the documents again")

    @property
    def version(self) -> int:
        """Grows with every change."""
        return int(self.meta("version", 0))

    @property
    def num_chunks(self) -> int:
        return int(self._one("SELECT count(*) FROM chunks")[0])

    def meta(self, name: str, default: Any = None) -> Any:
        """A value about the whole collection, such as the length of its vectors."""
        row = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return row[0][0] if row else default

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Store values about the whole collection."""
        with self._transaction() as cursor:
            cursor.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(values.items()))

    def put(self, documents: Sequence[EmbeddedDocument]) -> int:
        """Add or replace documents, all of them or none; returns the new version."""
        with self._transaction() as cursor:
            version = self._next_version(cursor)
            for document in documents:
                remove_documents(cursor, [document.id], version)
                insert_document(cursor, document, version)
        return version

    def remove(self, document_ids: Sequence[str]) -> tuple[int, int]:
        """Remove documents; returns how many were there, and the new version."""
        with self._transaction() as cursor:
            version = self._next_version(cursor)
            return remove_documents(cursor, document_ids, version), version

    def rename(self, moves: Mapping[str, str]) -> int:
        """Give documents new ids and sources, and remove those that had them; returns the new version."""
        with self._transaction() as cursor:
            version = self._next_version(cursor)
            rename_documents(cursor, moves, version)
        return version

    def changed_since(self, version: int) -> tuple[list[int], list[int]]:
        """Keys of chunks added and removed after a version."""
        added = [key for (key,) in self._rows("SELECT key FROM chunks WHERE version > ? ORDER BY key", (version,))]
        removed = [key for (key,) in self._rows("SELECT key FROM removed WHERE version > ? ORDER BY key", (version,))]
        return added, removed

    def forget_removed(self, version: int) -> None:
        """Drop the record of removals up to a version that every index has applied."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM removed WHERE version <= ?", (version,))

    def chunks(self, keys: Sequence[int]) -> dict[int, StoredChunk]:
        """Chunks by key; removed ones are left out."""
        rows = self._many(
            f"SELECT c.key, d.id, c.ordinal, c.text, c.start, c.stop, c.heading, {self._place}, d.source, d.metadata"
            " FROM chunks c JOIN documents d ON d.key = c.document WHERE c.key IN ({})",
            keys,
        )
        with _damaged_rows(self._path):
            return {
                key: StoredChunk(key, document, ordinal, text_chunk(chunk), source, json.loads(metadata))
                for key, document, ordinal, *chunk, source, metadata in rows
            }

    def vectors(self, keys: Sequence[int]) -> dict[int, Float32]:
        """Vectors by key of their chunk, in f32 as they were added."""
        rows = self._many("SELECT key, vector FROM chunks WHERE key IN ({})", keys)
        with _damaged_rows(self._path):
            return {key: np.frombuffer(blob, np.float32) for key, blob in rows}

    def matching(self, condition: Condition) -> list[int]:
        """Keys of the chunks whose document meets a condition."""
        sql, arguments = to_sql(condition)
        documents = f"SELECT key FROM documents WHERE {sql}"
        return [key for (key,) in self._rows(f"SELECT key FROM chunks WHERE document IN ({documents})", arguments)]

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        rows = self._rows(
            "SELECT d.id, d.source, d.metadata, count(c.key) FROM documents d LEFT JOIN chunks c ON c.document = d.key"
            " GROUP BY d.key ORDER BY d.id"
        )
        with _damaged_rows(self._path):
            return [
                {"id": id_, "source": source, "metadata": json.loads(metadata), "chunks": chunks}
                for id_, source, metadata, chunks in rows
            ]

    def digests(self, document_ids: Sequence[str]) -> dict[str, bytes]:
        """Content hashes of those documents that are stored."""
        return dict(self._many("SELECT id, digest FROM documents WHERE id IN ({})", document_ids))

    def owners(self, digests: Sequence[bytes]) -> dict[bytes, str]:
        """Ids of the documents that have these content hashes."""
        return dict(self._many("SELECT digest, id FROM documents WHERE digest IN ({})", digests))

    def files_below(self, folder: str) -> dict[str, bytes]:
        """Content hashes of the documents that are files below a folder: their id is their source."""
        prefix = folder.rstrip("/") + "/"
        sql = "SELECT id, digest FROM documents WHERE id = source AND substr(id, 1, ?) = ? ORDER BY id"
        return dict(self._rows(sql, (len(prefix), prefix)))

    def ids_from(self, source: str) -> list[str]:
        """Ids of the documents of a file, or of all files below a folder."""
        prefix = source.rstrip("/") + "/"
        sql = "SELECT id FROM documents WHERE source = ? OR substr(source, 1, ?) = ? ORDER BY id"
        return [id_ for (id_,) in self._rows(sql, (source, len(prefix), prefix))]

    def check(self) -> None:
        """Raise if the file is damaged or a chunk has no document."""
        with _storage_errors(self._path):
            result = self._one("PRAGMA quick_check")[0]
            orphans = self._one("SELECT count(*) FROM chunks WHERE document NOT IN (SELECT key FROM documents)")[0]
        if result != "ok" or orphans:
            raise StorageError(f"{self._path} is damaged ({result}, {orphans} orphans); index the documents again")

    def close(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()

    def _next_version(self, cursor: sqlite3.Cursor) -> int:
        cursor.execute("INSERT OR IGNORE INTO facts VALUES ('version', 0)")
        cursor.execute("UPDATE facts SET value = value + 1 WHERE name = 'version'")
        return int(cursor.execute("SELECT value FROM facts WHERE name = 'version'").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with self._lock, _storage_errors(self._path):
            if self._writer is None:
                raise StorageError(f"{self._path.parent} cannot be changed: it is open for reading only")
            cursor = self._writer.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    cursor.execute("ROLLBACK")
                raise

    def _rows(self, sql: str, arguments: Sequence[Any] = ()) -> list[Any]:
        with self._reader_lock, _storage_errors(self._path):
            return self._reader.execute(sql, arguments).fetchall()

    def _one(self, sql: str) -> Any:
        return self._rows(sql)[0]

    def _many(self, sql: str, values: Sequence[Any]) -> Iterable[Any]:
        """Rows for a list of values of any length."""
        rows: list[Any] = []
        for start in range(0, len(values), MAX_VARIABLES):
            some = list(values[start : start + MAX_VARIABLES])
            rows += self._rows(sql.format(",".join("?" * len(some))), some)
        return rows


def require_file(path: Path) -> None:
    """Refuse a store that is something else than a file; none is fine."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise StorageError(
            f"{path} is {kind}, not a file; move it away, or remove the collection (kvarn index rm --all, or DELETE)"
        )


def live_bytes(path: Path) -> int:
    """The bytes of a store without the pages that removed documents have freed; it may be open elsewhere."""
    with closing(_connect_reader(path)) as connection, _storage_errors(path):
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return int((pages - free) * size)


def _connect(path: Path) -> sqlite3.Connection:
    connection = _connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    return connection


def _connect_reader(path: Path) -> sqlite3.Connection:
    """Read-only. Where SQLite may not create the WAL's shared-memory file, the database file alone, as immutable."""
    for options in ("mode=ro", "mode=ro&immutable=1"):
        try:
            uri = f"{path.absolute().as_uri()}?{options}"
            connection = _connection(uri, is_uri=True)
            connection.execute("SELECT count(*) FROM facts")
        except sqlite3.OperationalError:
            continue
        return connection
    raise StorageError(f"{path} cannot be read; check its permissions")


def _connection(database: str, *, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(database, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=is_uri, check_same_thread=False)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError as error:
        if "closed" in str(error):
            raise StorageError(f"the collection in {path.parent} was closed; open it again") from None
        raise
    except (sqlite3.DatabaseError, OSError) as error:
        raise StorageError(f"{path}: {error}; what was stored before is kept: check the disk and try again") from error


@contextmanager
def _damaged_rows(path: Path) -> Iterator[None]:
    """Rows that SQLite can read and this module never wrote."""
    try:
        yield
    except (TypeError, ValueError) as error:
        remedy = "restore the file from a copy, or drop the collection and add its documents again"
        raise StorageError(f"{path} holds a damaged row ({error}); {remedy}") from error
