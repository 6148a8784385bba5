"""A change in Milvus happens wholly or not at all, though it takes several calls."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import StorageError
from kvarn.retrieval.milvus.commits import VersionRecord, last_commit
from kvarn.retrieval.types import EmbeddedDocument, TextChunk

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
from kvarn.retrieval.milvus import MilvusIndex
from tests.conftest import Size
from tests.rules.tree import ROOT
from tests.unit.retrieval.replacing import DOCUMENTS, InterruptedConnection, num_chunks

Contents = dict[str, list[str]]
OLD: Contents = {"a": ["old a0", "old a1", "old a2"], "b": ["old b0"]}
NEW: Contents = {"a": ["new a0"], "b": ["old b0"], "c": ["new c0", "new c1"]}


class Cut(Exception):
    """The connection is gone."""


def cut() -> None:
    raise Cut


def opened(uri: str, *, is_done: bool = False) -> tuple[MilvusIndex, InterruptedConnection]:
    connection = InterruptedConnection(uri, cut, is_done=is_done)
    return MilvusIndex(connection, "c", wait_s=10.0, lease_s=0.6), connection


def prepared(uri: str, contents: Contents) -> None:
    """A collection with these documents; making it takes longer than the short lease of those who are to die."""
    index = MilvusIndex(uri, "c", wait_s=10.0)
    index.put([_entry(id_, texts) for id_, texts in contents.items()])
    index.remove(sorted({"a", "b", "c", "d"} - set(contents)))
    index.close()


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_replacement_that_is_cut_short_is_seen_wholly_or_not_at_all(
    tmp_path: Path, size: Size, is_done: bool
) -> None:
    """Claim, ticket, rows, record, what is outdated, removal of rows and of gravestones, record, end of the claim."""
    uri = str(tmp_path / "c.db")
    outcomes = []
    for num_calls in range(size(2, 0), size(6, 9)):
        prepared(uri, OLD)
        index, connection = opened(uri, is_done=is_done)
        connection.calls_left = num_calls
        with pytest.raises(Cut):
            index.put([_entry(id_, NEW[id_]) for id_ in ("a", "c")])
        connection.close()
        index, _ = opened(uri)  # as after a crash
        seen = _contents(index)
        assert seen in (OLD, NEW)
        outcomes.append(seen == NEW)
        index.put([_entry("d", ["later"])])
        assert _contents(index) == seen | {"d": ["later"]}
        assert _num_rows(index) == sum(map(len, seen.values())) + 1  # nothing is left behind
        index.store.client.close()
    assert outcomes == sorted(outcomes)  # a sign of life more, on a busy machine, puts the record one call later
    assert set(outcomes) == {False, True}


def test_a_removal_and_a_renaming_that_are_cut_short_are_seen_wholly_or_not_at_all(tmp_path: Path, size: Size) -> None:
    uri = str(tmp_path / "c.db")
    before: Contents = {"a": ["old a"], "b": ["old b"], "c": ["old c"]}
    changes: list[tuple[Callable[[MilvusIndex], object], Contents]] = [
        (lambda index: index.remove(["a", "b"]), {"c": ["old c"]}),
        (lambda index: index.rename({"a": "b", "b": "d"}), {"b": ["old a"], "d": ["old b"], "c": ["old c"]}),
    ]
    for change, after in changes:
        outcomes = []
        for num_calls in range(size(3, 0), size(6, 9)):
            prepared(uri, before)
            index, connection = opened(uri)
            connection.calls_left = num_calls
            with pytest.raises(Cut):
                change(index)
            connection.close()
            index, _ = opened(uri)
            seen = _contents(index)
            assert seen in (before, after)
            outcomes.append(seen == after)
            index.put([_entry("c", ["old c new"])])
            assert _num_rows(index) == len(_contents(index))
            index.store.client.close()
        assert outcomes == sorted(outcomes)
        assert set(outcomes) == {False, True}


def test_a_failed_change_may_be_made_again_by_the_same_process(tmp_path: Path) -> None:
    prepared(str(tmp_path / "c.db"), OLD)
    index, connection = opened(str(tmp_path / "c.db"), is_done=True)
    for num_calls in range(2, 6):
        connection.calls_left = num_calls
        with pytest.raises(Cut):
            index.put([_entry(id_, NEW[id_]) for id_ in ("a", "c")])
        connection.calls_left = None
        assert _contents(index) in (OLD, NEW)
    index.put([_entry(id_, NEW[id_]) for id_ in ("a", "c")])
    assert _contents(index) == NEW
    assert _num_rows(index) == 4
    assert index.remove(["a", "nope"]) == 1
    assert _contents(index) == {"b": ["old b0"], "c": ["new c0", "new c1"]}
    index.close()


def test_the_bytes_of_a_collection_are_those_of_its_rows(tmp_path: Path) -> None:
    index = MilvusIndex(str(tmp_path / "c.db"), "c")
    assert index.num_bytes == 0
    index.put([_entry(id_, texts) for id_, texts in OLD.items()])
    whole = index.num_bytes
    index.put([_entry("a", ["x" * 1000])])
    assert index.num_bytes - whole > 800
    index.put([_entry("a", OLD["a"])])
    assert index.num_bytes == whole
    index.rename({"a": "z"})
    index.remove(["z", "b"])
    assert index.num_bytes <= len("z") * 3  # of its source, which has a name now
    index.close()


def test_a_reader_sees_what_another_process_has_committed(tmp_path: Path) -> None:
    uri = str(tmp_path / "c.db")
    writer = MilvusIndex(uri, "c")
    writer.put([_entry(id_, texts) for id_, texts in OLD.items()])
    reader = MilvusIndex(uri, "c")
    version = reader.version
    writer.put([_entry(id_, NEW[id_]) for id_ in ("a", "c")])
    assert reader.version == writer.version > version
    assert _contents(reader) == NEW
    reader.close()


def test_a_collection_of_an_older_format_is_refused(tmp_path: Path) -> None:
    index = MilvusIndex(str(tmp_path / "c.db"), "c")
    index.put([_entry("a", ["x"])])
    index.store.set_meta({"format": 1})
    index.close()
    with pytest.raises(StorageError, match="another version of Kvarn"):
        MilvusIndex(str(tmp_path / "c.db"), "c")


def test_the_newest_record_counts_and_never_overwrites_the_last() -> None:
    commit, facts = VersionRecord(epoch=(1, "x")), {}
    for version in (1, 1, 2, 3):
        before, commit = commit, commit.after((1, "x"), version)
        facts |= commit.facts()
        assert last_commit(facts) == commit
        if before.number:
            assert last_commit({k: v for k, v in facts.items() if k not in commit.facts()}) == before
    assert last_commit({}) == VersionRecord()


def test_a_record_of_a_writer_that_was_given_up_never_counts() -> None:
    dead = VersionRecord().after((1, "x"), 1)
    successor = dead.taken_over((2, "a"))
    assert (successor.version, successor.next_version) == (1, 3)
    late = dead.after((1, "x"), 2)
    assert last_commit(dead.facts() | successor.facts() | late.facts()) == successor


def _entry(document: str, texts: list[str]) -> EmbeddedDocument:
    chunks = [TextChunk(text, 0, len(text)) for text in texts]
    return EmbeddedDocument(document, "", " ".join(texts).encode(), {}, chunks, np.ones((len(texts), 2), np.float32))


def _contents(index: MilvusIndex) -> Contents:
    """What every way of looking sees; they must agree."""
    found = index.dense(np.ones(2, np.float32), 100, None)
    chunks = sorted(index.store.chunks([key for key, _ in found]).values(), key=lambda one: (one.document, one.ordinal))
    contents: Contents = {}
    for chunk in chunks:
        contents.setdefault(chunk.document, []).append(chunk.chunk.text)
    counts = {one["id"]: one["chunks"] for one in index.store.documents()}
    assert counts == {id_: len(texts) for id_, texts in contents.items()}
    assert index.num_chunks == len(found)
    assert set(index.store.digests(["a", "b", "c", "d"])) == set(contents)
    words = {index.store.chunks([key])[key].chunk.text for key, _ in index.sparse("old", 100, None)}
    assert words == {text for texts in contents.values() for text in texts if "old" in text}
    return contents


def _num_rows(index: MilvusIndex) -> int:
    """Rows that are there, whether they count or not, gravestones included."""
    return len(index.store.rows(("document",), "version >= 0"))


@pytest.mark.long
def test_a_killed_process_leaves_whole_generations_in_milvus(tmp_path: Path) -> None:
    rng, last = random.Random(0), -1
    for number in range(20):
        seen, said = _replace_and_kill(str(tmp_path / "c.db"), rng.uniform(0.0, 0.5), num_waited=number % 3)
        assert set(seen) <= {last, last + 1}  # the last one said, or one that was stored and could not be said any more
        if seen:
            last = seen[0]
            assert seen == [last] * DOCUMENTS * num_chunks(last)
        last = max([last, *said])
    assert last >= 18


def _replace_and_kill(uri: str, after_s: float, num_waited: int) -> tuple[list[int], list[int]]:
    """The generations of the chunks that a process found, and those that it said were stored; at least num_waited."""
    command = [sys.executable, "-m", "tests.unit.retrieval.replacing", uri]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = json.loads(process.stdout.readline())
    waited = [process.stdout.readline().strip() for _ in range(num_waited)]
    time.sleep(after_s)
    process.kill()
    said = waited + process.stdout.read().split("\n")[:-1]  # a line cut in two was never said
    process.wait()
    return seen, [int(line) for line in said]
