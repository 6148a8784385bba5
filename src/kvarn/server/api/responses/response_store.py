"""Responses that are kept for their key, to be continued or read again: in memory, or in a file of SQLite.

One budget of bytes for all keys. When it is full, the key that holds most gives up its oldest, so nobody loses
anything to a key that stores more than they do. Knows JSON; what an item means is known to its readers. Blocks.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.errors import ConfigError
from kvarn.server.http.json_body import write_json

MAX_SHARE = 4  # a response of more than 1 / MAX_SHARE of the budget is not kept
FORMAT = 1  # of the file
_TABLE = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL,
    num_bytes INTEGER NOT NULL, UNIQUE (owner, id)
)
"""
_LARGEST_FIRST = "SELECT owner, TOTAL(num_bytes) FROM responses GROUP BY owner ORDER BY 2 DESC, MIN(number)"
_OLDEST_FIRST = "SELECT number, num_bytes FROM responses WHERE owner = ? ORDER BY number"


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


class ResponseStore:
    """For any thread; each call is one transaction."""

    def __init__(self, path: Path | None, budget_bytes: int) -> None:
        """path: of the file, made if need be; None: in memory."""
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        try:
            self._db = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"response_store {path} cannot be used: {error}; give another file") from None

    def put(self, owner: str, stored: StoredResponse) -> bool:
        """Keep a response, at the expense of older ones if need be; whether it is kept."""
        response, items = write_json(stored.response), write_json({"items": stored.items})
        num_bytes = len(response) + len(items)
        if num_bytes > self._budget_bytes // MAX_SHARE:
            return False
        row = (owner, stored.id, response, items, num_bytes)
        with self._lock, self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO responses (owner, id, response, items, num_bytes) VALUES (?,?,?,?,?)", row
            )
            self._make_room(self._num_bytes() - self._budget_bytes)
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response with this id, if it is the owner's."""
        with self._lock:
            found = self._db.execute(
                "SELECT response, items FROM responses WHERE owner = ? AND id = ?", (owner, response_id)
            ).fetchone()
        if found is None:
            return None
        response, items = map(json.loads, found)
        return StoredResponse(response_id, response, items["items"])

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._lock, self._db:
            done = self._db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))
        return done.rowcount > 0

    async def close(self) -> None:
        with self._lock:
            self._db.close()

    def _make_room(self, num_bytes: int) -> None:
        """Drop so much, each time the oldest response of the key that holds most."""
        if num_bytes <= 0:
            return
        held = dict(self._db.execute(_LARGEST_FIRST))
        oldest = {owner: iter(self._db.execute(_OLDEST_FIRST, (owner,)).fetchall()) for owner in held}
        dropped = []
        while num_bytes > 0:
            owner = max(held, key=held.__getitem__)
            number, size = next(oldest[owner])
            dropped.append((number,))
            held[owner] -= size
            num_bytes -= size
        self._db.executemany("DELETE FROM responses WHERE number = ?", dropped)

    def _num_bytes(self) -> int:
        (total,) = self._db.execute("SELECT TOTAL(num_bytes) FROM responses").fetchone()
        return int(total)


def _opened(path: Path | None) -> sqlite3.Connection:
    if path is not None:  # before SQLite makes it: only the server's user may read conversations
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False, timeout=10.0)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found not in (0, FORMAT):
        raise OSError(f"it has format {found}, this version writes {FORMAT}")
    if found == 0:
        with db:
            db.execute(_TABLE)
            db.execute("CREATE INDEX by_owner ON responses (owner, num_bytes)")
            db.execute(f"PRAGMA user_version = {FORMAT}")
    return db
