"""Several processes on one Milvus: one changes a collection at a time, all others search it meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import CollectionLocked, CollectionNotFound, StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.types import Document

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
from kvarn.retrieval.milvus import MilvusIndex
from kvarn.retrieval.milvus.names import chunks_name, facts_name, names_among
from tests.rules.tree import ROOT
from tests.unit.retrieval.milvus_server import MilvusServer
from tests.unit.retrieval.replacing import DOCUMENTS, entry, num_chunks
from tests.unit.retrieval.words import WordEmbedder

LEASE_S = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    with MilvusServer(tmp_path_factory.mktemp("milvus")) as milvus:
        yield milvus


def generations(index: MilvusIndex) -> list[int]:
    found = index.store.chunks([key for key, _ in index.dense(np.ones(2, np.float32), 100, None)])
    return sorted(int(chunk.chunk.text) for chunk in found.values())


def replace(index: MilvusIndex, generation: int) -> None:
    index.put([entry(generation, number) for number in range(DOCUMENTS)])


def replacing(server: MilvusServer, name: str, frozen_at: int | str = "") -> subprocess.Popen[str]:
    """A process that replaces documents, and has done so once."""
    arguments = [server.uri, str(LEASE_S), name, str(frozen_at)]
    command = [sys.executable, "-m", "tests.unit.retrieval.replacing", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    return process


def test_a_second_writer_is_refused_by_name_and_takes_its_turn_when_the_first_has_ended(server: MilvusServer) -> None:
    first = MilvusIndex(server.uri, "turns", wait_s=0.2, lease_s=30.0)
    second = MilvusIndex(server.uri, "turns", wait_s=0.2, lease_s=30.0)
    with first.writing():
        with pytest.raises(CollectionLocked, match=r"is being changed by process \d+ on "):
            replace(second, 1)
        replace(first, 0)
    replace(second, 1)
    assert generations(first) == generations(second) == [1] * DOCUMENTS * num_chunks(1)
    assert first.version == second.version == 2


def test_a_waiting_writer_goes_on_as_soon_as_the_other_has_ended(server: MilvusServer) -> None:
    first, second = (MilvusIndex(server.uri, "queue", wait_s=20.0) for _ in range(2))
    with first.writing():
        waiting = threading.Thread(target=replace, args=(second, 1))
        waiting.start()
        time.sleep(0.3)
        replace(first, 0)
    waiting.join(10.0)
    assert generations(first) == [1] * DOCUMENTS * num_chunks(1)


def test_many_writers_at_once_lose_nothing(server: MilvusServer) -> None:
    """Each adds documents of its own, all ask for the lease at the same time."""
    indexes = [MilvusIndex(server.uri, "crowd", wait_s=60.0) for _ in range(4)]
    versions: list[int] = []

    def add(number: int) -> None:
        with Collection("crowd", index=indexes[number], model=WordEmbedder()) as collection:
            for one in range(4):
                collection.add([Document(f"text {number} {one}", id=f"{number}-{one}")])
                versions.append(collection.version)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check = MilvusIndex(server.uri, "crowd")
    assert {one["id"] for one in check.store.documents()} == {f"{n}-{one}" for n in range(4) for one in range(4)}
    assert check.version == max(versions) == 16
    assert not [name for name in check.store.facts.read() if name.startswith("writer-")]


def test_a_killed_writer_is_given_up_and_nothing_of_it_is_left(server: MilvusServer) -> None:
    """A reader sees whole generations all the time, the next writer goes on when the lease has ended."""
    reader = MilvusIndex(server.uri, "c", wait_s=10.0, lease_s=LEASE_S)
    process = replacing(server, "c")
    while not (seen := generations(reader)) or seen[0] < 3:
        assert process.poll() is None
        assert len(set(seen)) <= 1
        assert not seen or len(seen) == DOCUMENTS * num_chunks(seen[0])
    process.kill()
    process.wait()
    last = generations(reader)[0]
    replace(reader, last + 1)
    assert generations(reader) == [last + 1] * DOCUMENTS * num_chunks(last + 1)
    assert len(reader.store.rows(("document",), "version >= 0")) == DOCUMENTS * num_chunks(last + 1)
    assert [name for name in reader.store.facts.read() if name.startswith("writer-")] == []


@pytest.mark.parametrize("at", [2, 3, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 4, 5, 6))])
def test_a_writer_that_was_frozen_is_fenced(server: MilvusServer, at: int) -> None:
    """It stands still before a call of its change: what it does when it goes on is never seen, and it is told."""
    name = f"frozen{at}"
    other = MilvusIndex(server.uri, name, wait_s=20.0, lease_s=LEASE_S)
    process = replacing(server, name, at)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    last = generations(other)[0]
    assert last == (0 if at < 4 else 1)  # from the record on it counts
    replace(other, last + 1)
    process.send_signal(signal.SIGCONT)
    while process.poll() is None:
        assert generations(other) == [last + 1] * DOCUMENTS * num_chunks(last + 1)
    assert process.stderr is not None
    told = process.stderr.read()
    assert "this process stood still" in told or (at < 2 and "too slowly" in told), told
    replace(other, last + 2)
    assert generations(other) == [last + 2] * DOCUMENTS * num_chunks(last + 2)
    assert [name for name in other.store.facts.read() if name.startswith("writer-")] == []


def test_a_reader_notices_the_first_documents_of_another_process(server: MilvusServer) -> None:
    reader, writer = MilvusIndex(server.uri, "late"), MilvusIndex(server.uri, "late")
    assert generations(reader) == []
    replace(writer, 0)
    assert generations(reader) == [0] * DOCUMENTS * num_chunks(0)


def test_a_collection_that_was_removed_is_not_found_also_when_one_of_its_name_is_made(server: MilvusServer) -> None:
    reader, writer = MilvusIndex(server.uri, "gone"), MilvusIndex(server.uri, "gone")
    replace(writer, 0)
    assert generations(reader)
    writer.drop()
    with pytest.raises(CollectionNotFound):
        generations(reader)
    replace(MilvusIndex(server.uri, "gone"), 5)
    with pytest.raises(CollectionNotFound, match="ask again"):
        generations(reader)
    with pytest.raises(CollectionNotFound, match="no collection 'nowhere'"):
        MilvusIndex(server.uri, "nowhere", must_exist=True)


def test_a_milvus_that_is_away_is_told_by_its_address_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    with MilvusServer(tmp_path / "m") as milvus:
        index = MilvusIndex(milvus.uri, "c")
        replace(index, 0)
        milvus.freeze()
        began = time.monotonic()
        with pytest.raises(StorageError, match=rf"Milvus at {milvus.uri}: .*check that it runs"):
            index.dense(np.ones(2, np.float32), 1, None)
        assert time.monotonic() - began < 8.0
        began = time.monotonic()
        with pytest.raises(StorageError, match="did not answer a moment ago"):
            index.dense(np.ones(2, np.float32), 1, None)
        assert time.monotonic() - began < 0.5
        milvus.thaw()
        time.sleep(2.1)
        assert generations(index) == [0] * DOCUMENTS * num_chunks(0)
    with pytest.raises(StorageError, match="check that it runs"):
        MilvusIndex(milvus.uri, "c")


def test_a_moved_file_is_found_under_its_new_path(
    server: MilvusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, embedder = Path("docs"), WordEmbedder()
    folder.mkdir()
    (folder / "mill.md").write_text("A mill grinds grain.")
    (folder / "star.md").write_text("Stars shine.")
    with Collection("moved", index=MilvusIndex(server.uri, "moved"), model=embedder) as collection:
        collection.sync(folder)
        num_embedded = embedder.num_embedded
        (folder / "mill.md").rename(folder / "x")
        (folder / "star.md").rename(folder / "mill.md")
        (folder / "x").rename(folder / "wheel.md")
        assert collection.sync(folder).moved == {"docs/mill.md": "docs/wheel.md", "docs/star.md": "docs/mill.md"}
        assert embedder.num_embedded == num_embedded
        assert [hit.source for hit in collection.search("grain", 5, "sparse")] == ["docs/wheel.md"]
        assert collection.files_below("docs").keys() == {"docs/mill.md", "docs/wheel.md"}
        assert not collection.sync(folder).has_changes


def test_names_of_collections_are_escaped_and_found_again() -> None:
    names = ["a-b", "a.b", "a_b", "ab", "ab_facts", "2d", "x" * 64, "A_2d"]
    found = [make(name, tenant) for name in names for tenant in ("", "t") for make in (chunks_name, facts_name)]
    assert len(set(found)) == len(found)
    assert names_among(found) == names_among(found, "t") == sorted(names)
    assert names_among(found, "other") == []
    assert max(map(len, found)) <= 255
