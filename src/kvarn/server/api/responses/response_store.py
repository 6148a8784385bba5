"""Responses that are kept for their key, to be continued or read again: in memory, or in a file of SQLite.

One budget of bytes for all keys. When it is full, the key that holds most gives up its oldest, so nobody loses
anything to a key that stores more than they do. Knows JSON; what an item means is known to its readers. Blocks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.errors import ConfigError
from kvarn.server.http.json_body import write_json
from kvarn.server.http.request_id import TAG_CHARS

log = logging.getLogger("kvarn.server")
MAX_SHARE = 4  # a response of more than 1 / MAX_SHARE of the budget is not kept
FORMAT = 2  # of the file; in format 1 the owner was the name of a key, which another key may have by now
_TABLE = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL,
    num_bytes INTEGER NOT NULL, UNIQUE (owner, id)
)
"""
_SELECT = "SELECT response, items FROM responses WHERE owner = ? AND id = ?"
_INSERT = "INSERT INTO responses (owner, id, response, items, num_bytes) VALUES (?,?,?,?,?)"
_OLDEST_FIRST = "SELECT number, num_bytes FROM responses WHERE owner = ? ORDER BY number"  # without sorting: by_owner


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items of the whole conversation that it answers."""

    id: str
    response: dict[str, Any]
    items: list[dict[str, Any]]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """What a request that continues it begins with."""
        return [*self.items, *self.response["output"]]


@dataclass(frozen=True, slots=True)
class WrittenResponse:
    """The same as JSON: what is only passed on is never parsed, as that holds up every other thread."""

    response: bytes
    items: list[tuple[str, bytes]]  # with their ids

    @classmethod
    def of(cls, stored: StoredResponse) -> WrittenResponse:
        return cls(write_json(stored.response), [(item.get("id", ""), write_json(item)) for item in stored.items])

    @property
    def num_bytes(self) -> int:
        return len(self.response) + sum(len(item) for _, item in self.items)

    @property
    def lines(self) -> bytes:
        """The items, each in a line after its id; neither has a line break."""
        return b"\n".join(id.encode() + b" " + item for id, item in self.items)

    @classmethod
    def read(cls, response: bytes, lines: bytes) -> WrittenResponse:
        parts = [line.partition(b" ") for line in lines.split(b"\n")] if lines else []
        return cls(response, [(id.decode(), item) for id, _, item in parts])

    def parsed(self, id: str) -> StoredResponse:
        return StoredResponse(id, json.loads(self.response), [json.loads(item) for _, item in self.items])


class ResponseStore:
    """For any thread; each call is one transaction."""

    def __init__(self, path: Path | None, budget_bytes: int) -> None:
        """path: of the file, made if need be; None: in memory."""
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        try:
            self._db = _opened(path)
            self._held = self._count()  # bytes by owner
            self.tag = _tag(self._db)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"response_store {path} cannot be used: {error}; give another file") from None

    def put(self, owner: str, stored: StoredResponse) -> bool:
        """Keep a response, at the expense of older ones if need be; whether it is kept."""
        written = WrittenResponse.of(stored)
        num_bytes = written.num_bytes
        if num_bytes > self._budget_bytes // MAX_SHARE:
            return False
        row = (owner, stored.id, written.response, written.lines, num_bytes)
        with self._lock:
            try:
                with self._db:
                    self._delete(owner, stored.id)
                    self._db.execute(_INSERT, row)
                    self._held[owner] += num_bytes
                    self._make_room(self._held.total() - self._budget_bytes)
            except sqlite3.Error:
                self._held = self._count()  # nothing was changed
                raise
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response with this id, if it is the owner's."""
        found = self.get_written(owner, response_id)
        return None if found is None else found.parsed(response_id)

    def get_written(self, owner: str, response_id: str) -> WrittenResponse | None:
        """The same as JSON."""
        with self._lock:
            found = self._db.execute(_SELECT, (owner, response_id)).fetchone()
        return None if found is None else WrittenResponse.read(*found)

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._lock, self._db:
            return self._delete(owner, response_id)

    async def close(self) -> None:
        with self._lock:
            self._db.close()

    def _count(self) -> Counter[str]:
        return Counter(dict(self._db.execute("SELECT owner, SUM(num_bytes) FROM responses GROUP BY owner")))

    def _delete(self, owner: str, response_id: str) -> bool:
        sizes = self._db.execute(
            "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING num_bytes", (owner, response_id)
        ).fetchall()
        self._held[owner] -= sum(size for (size,) in sizes)
        return bool(sizes)

    def _make_room(self, num_bytes: int) -> None:
        """Drop so much, each time the oldest response of the key that holds most."""
        dropped, oldest = [], {}
        while num_bytes > 0:
            ((owner, _),) = self._held.most_common(1)
            if owner not in oldest:
                oldest[owner] = self._db.execute(_OLDEST_FIRST, (owner,))
            number, size = next(oldest[owner])
            dropped.append((number,))
            self._held[owner] -= size
            num_bytes -= size
        self._db.executemany("DELETE FROM responses WHERE number = ?", dropped)


def _opened(path: Path | None) -> sqlite3.Connection:
    if path is not None:  # before SQLite makes it: only the server's user may read conversations
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False, timeout=10.0)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found not in range(FORMAT + 1):
        raise OSError(f"it has format {found}, this version writes {FORMAT}")
    if found == FORMAT:
        return db
    with db:
        if found:
            log.warning("the stored responses of format %d belong to no key of today and were dropped", found)
            db.execute("DROP TABLE responses")
        db.execute(_TABLE)
        db.execute("CREATE INDEX by_owner ON responses (owner)")
        db.execute(f"PRAGMA user_version = {FORMAT}")
    return db


def _tag(db: sqlite3.Connection) -> str:
    """A name that the ids of responses begin with, by which a router finds this store: it stays with the file."""
    (number,) = db.execute("PRAGMA application_id").fetchone()
    if not number:
        number = secrets.randbelow(2**31 - 1) + 1
        db.execute(f"PRAGMA application_id = {number}")
    return f"{number & 0xFFFFFFFF:0{TAG_CHARS}x}"
