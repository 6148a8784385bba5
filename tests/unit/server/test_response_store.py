"""Stored responses: one budget, and whoever holds most gives up the oldest."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from kvarn.errors import ConfigError
from kvarn.server.api.responses.response_store import ResponseStore, StoredResponse

BUDGET = 40_000


def response(name: str, num_bytes: int = 1000) -> StoredResponse:
    return StoredResponse(name, {"id": name, "output": [{"text": "é" * (num_bytes // 2)}]}, [{"id": "in"}])


def ids(store: ResponseStore, owner: str, names: list[str]) -> list[str]:
    return [name for name in names if store.get(owner, name) is not None]


def test_what_is_put_is_what_is_got() -> None:
    store, stored = ResponseStore(None, BUDGET), response("a")
    assert store.put("alice", stored)
    assert store.get("alice", "a") == stored
    assert store.get("bert", "a") is None
    assert stored.conversation == [{"id": "in"}, *stored.response["output"]]


def test_half_of_a_surrogate_pair_is_kept() -> None:
    store = ResponseStore(None, BUDGET)
    stored = StoredResponse("a", {"output": [{"text": "\ud83d"}]}, [])
    assert store.put("alice", stored)
    assert store.get("alice", "a") == stored


def test_only_the_owner_deletes() -> None:
    store = ResponseStore(None, BUDGET)
    store.put("alice", response("a"))
    assert not store.delete("bert", "a")
    assert store.delete("alice", "a")
    assert not store.delete("alice", "a")


def test_a_key_that_stores_most_loses_its_own_oldest() -> None:
    store = ResponseStore(None, BUDGET)
    store.put("alice", response("small"))
    names = [f"r{number}" for number in range(100)]
    for name in names:
        assert store.put("bert", response(name))
    assert store.get("alice", "small") is not None
    kept = ids(store, "bert", names)
    assert 30 <= len(kept) <= 40
    assert kept == names[-len(kept) :]


def test_two_keys_that_store_without_end_share_the_budget() -> None:
    store = ResponseStore(None, BUDGET)
    names = [f"r{number}" for number in range(100)]
    for name in names:
        store.put("alice", response(name))
        store.put("bert", response(name))
    kept = [len(ids(store, owner, names)) for owner in ("alice", "bert")]
    assert abs(kept[0] - kept[1]) <= 1
    assert 30 <= sum(kept) <= 40


def test_a_response_too_large_for_the_budget_is_not_kept_and_costs_nobody_anything() -> None:
    store = ResponseStore(None, BUDGET)
    store.put("alice", response("small"))
    assert not store.put("bert", response("large", BUDGET // 2))
    assert store.get("alice", "small") is not None
    assert not ResponseStore(None, 0).put("alice", response("any", 2))


def test_a_file_is_read_again_and_a_wrong_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    ResponseStore(path, BUDGET).put("alice", response("a"))
    assert ResponseStore(path, BUDGET).get("alice", "a") == response("a")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    for wrong in (path, tmp_path, tmp_path / "no" / "folder.sqlite"):
        with pytest.raises(ConfigError, match="response_store"):
            ResponseStore(wrong, BUDGET)
    (tmp_path / "text").write_text("this is no database, but long enough to look at" * 20)
    with pytest.raises(ConfigError, match="response_store"):
        ResponseStore(tmp_path / "text", BUDGET)


def test_making_room_for_one_takes_no_longer_for_many_old_ones() -> None:
    store = ResponseStore(None, 2_000_000)
    for number in range(4_000):
        assert store.put(f"key{number % 3}", response(f"r{number}", 400))
    started_at = time.process_time()
    assert store.put("key0", response("large", 400_000))
    assert time.process_time() - started_at < 1.0  # some 1,000 are dropped
    assert store.get("key0", "large") is not None


def test_what_is_only_read_again_is_not_parsed() -> None:
    store = ResponseStore(None, 80_000_000)
    items = [{"id": f"i{number}", "content": [number] * 2_000} for number in range(500)]
    stored = StoredResponse("a", {"id": "a", "output": [[1] * 1_000_000]}, items)
    assert store.put("alice", stored)
    times = []
    for read in (store.get_written, store.get):
        started_at = time.process_time()
        assert read("alice", "a") is not None
        times.append(time.process_time() - started_at)
    assert times[1] > 3 * times[0]
    written = store.get_written("alice", "a")
    assert written is not None
    assert written.parsed("a") == stored
    assert [id for id, _ in written.items] == [item["id"] for item in items]


def test_a_file_of_the_time_when_names_were_owners_opens_empty(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE responses (number INTEGER PRIMARY KEY, owner TEXT, id TEXT, num_bytes INTEGER)")
        db.execute("INSERT INTO responses (owner, id, num_bytes) VALUES ('alice', 'a', 3)")
        db.execute("PRAGMA user_version = 1")
    store = ResponseStore(path, BUDGET)
    assert store.get("alice", "a") is None
    assert store.put("alice", response("b"))


def test_what_cannot_be_stored_changes_no_count(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(path, BUDGET)
    assert store.put("alice", response("a"))
    with sqlite3.connect(path) as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON responses BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    for _ in range(60):
        with pytest.raises(sqlite3.Error):
            store.put("alice", response("a"))
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER full")
    assert store.put("alice", response("b"))
    assert ids(store, "alice", ["a", "b"]) == ["a", "b"]
