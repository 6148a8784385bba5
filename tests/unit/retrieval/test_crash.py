"""kill -9 at any moment loses at most the batch in flight; a damaged index is rebuilt."""

from __future__ import annotations

import random
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvarn.errors import StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.storage.document_store import DocumentStore
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.storage.folder import is_intact
from kvarn.retrieval.storage.manifest import read_manifest
from tests.conftest import Size
from tests.rules.tree import ROOT
from tests.unit.retrieval.ingesting import BATCH, document
from tests.unit.retrieval.words import WordEmbedder, clustered, entry


def test_an_index_that_has_no_room_to_be_made_anew_is_told_with_its_place(tmp_path: Path) -> None:
    index = EmbeddedIndex(tmp_path / "c")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"sparse-1: .*; check the disk and try again"):
            index._sync._new_sparse()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        index.close()


def test_killed_ingestion_loses_at_most_the_batch_in_flight(tmp_path: Path, size: Size) -> None:
    rng = random.Random(0)
    done = -1
    for _ in range(size(4, 200)):
        done = _ingest_and_kill(tmp_path, done + 1, rng.uniform(0.0, 0.6))
        index = EmbeddedIndex(tmp_path / "c")
        index.check()
        index.close()
        with Collection("c", folder=tmp_path, model=WordEmbedder(dim=16)) as collection:
            ids = {one["id"] for one in collection.documents()}
            whole = {f"b{b}-{n}" for b in range(done + 1) for n in range(BATCH)}
            deleted = {f"b{b - 1}-0" for b in range(2, done + 1, 3)}
            in_flight = {f"b{done + 1}-{n}" for n in range(BATCH)}
            maybe_deleted = {f"b{done}-0"} if (done + 1) % 3 == 2 else set()
            assert whole - deleted - maybe_deleted <= ids <= (whole - deleted) | in_flight
            assert not in_flight & ids or in_flight <= ids
            if in_flight <= ids:  # committed, but the process could not say so any more
                collection.delete(sorted(in_flight))
            for batch in {0, done} if done >= 0 else ():
                wanted = document(batch, 1)
                assert collection.search(wanted.text, 1)[0].document == wanted.key


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: next(folder.glob("dense-*")).unlink(),
        lambda folder: _overwrite(next(folder.glob("dense-*"))),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"version": "x", "dense": "../../etc"}'),
        lambda folder: _overwrite(next(folder.glob("sparse-*/*.idx"))),
        lambda folder: next(folder.glob("sparse-*/*.term")).unlink(),
        lambda folder: next(folder.glob("sparse-*/*.pos")).unlink(),
        lambda folder: next(folder.glob("sparse-*/*.fieldnorm")).unlink(),
        lambda folder: next(folder.glob("sparse-*/meta.json")).write_text("{"),
        lambda folder: [path.unlink() for path in next(folder.glob("sparse-*")).iterdir()],
    ],
    ids=[
        "graph gone",
        "graph damaged",
        "manifest gone",
        "manifest strange",
        "postings damaged",
        "terms gone",
        "positions gone",
        "lengths gone",
        "meta",
        "empty",
    ],
)
def test_a_damaged_index_is_rebuilt_and_told_of(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    vectors = clustered(200, 24)
    index = EmbeddedIndex(tmp_path)
    index.put([entry(n, vectors[n], f"common word{n}") for n in range(200)])
    dense, sparse = index.dense(vectors[3], 5, None), index.sparse("common word7", 5, None)
    index.close()
    damage(tmp_path)
    has_manifest = (tmp_path / "manifest.json").exists()
    assert not caplog.messages
    index = EmbeddedIndex(tmp_path)
    index.check()
    assert not has_manifest or any("is damaged" in one and str(tmp_path) in one for one in caplog.messages)
    assert index.dense(vectors[3], 5, None) == dense
    assert index.sparse("common word7", 5, None) == sparse
    index.close()


@pytest.mark.parametrize("is_gone", [False, True], ids=["changed", "gone"])
@pytest.mark.parametrize("kind", ["idx", "pos", "term"])
def test_a_reader_repairs_a_damaged_index(tmp_path: Path, kind: str, *, is_gone: bool) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add("a mill grinds grain")
    path = next((tmp_path / "c").glob(f"sparse-*/*.{kind}"))
    path.unlink() if is_gone else _overwrite(path)
    with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.search("grain", 1, "sparse")


def test_what_merges_have_removed_since_it_was_saved_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = clustered(40, 8)
    index = EmbeddedIndex(tmp_path)
    index.put([entry(0, vectors[0], "first")])
    index.remove(["d0"])
    index.put([entry(1, vectors[1], "second")])
    index.flush()
    saved = read_manifest(tmp_path)
    for number in range(2, 40):  # one commit each: small segments are merged, and their files removed
        index.put([entry(number, vectors[number], f"word{number}")])
    index.close()
    assert saved is not None
    folder = tmp_path / saved.sparse
    assert not all((folder / name).is_file() for name in saved.sparse_files)
    assert is_intact(folder, saved.sparse_files)
    assert not caplog.messages


@pytest.mark.parametrize("opened", [Collection, Collection.open], ids=["written", "read"])
def test_a_lost_store_is_told_and_not_taken_for_an_empty_one(tmp_path: Path, opened: Callable[..., Collection]) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add("a mill grinds grain")
    for path in (tmp_path / "c").glob("truth.sqlite*"):
        path.unlink()
    (tmp_path / "c" / "truth.sqlite").touch()
    with pytest.raises(StorageError, match="lost documents"):
        opened("c", folder=tmp_path, model=WordEmbedder()).search("grain", 1)


@pytest.mark.parametrize("column", ["vector", "metadata"])
def test_a_damaged_row_is_told(tmp_path: Path, column: str) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add("a mill grinds grain")
    table = {"vector": "chunks", "metadata": "documents"}[column]
    with closing(sqlite3.connect(tmp_path / "c" / "truth.sqlite")) as connection:
        connection.execute(f"UPDATE {table} SET {column} = 'no'")
        connection.commit()
    store = DocumentStore(tmp_path / "c", is_writable=False)
    with closing(store), pytest.raises(StorageError, match="damaged row"):
        store.documents() if column == "metadata" else store.vectors([1])


def test_a_text_index_that_failed_once_catches_up(tmp_path: Path) -> None:
    index = EmbeddedIndex(tmp_path)
    vectors = clustered(3, 8)
    index.put([entry(0, vectors[0], "first")])
    for path in index._sync.sparse.folder.iterdir():  # as a disk that fails: the next segment cannot be written
        path.unlink()
    index._sync.sparse.folder.rmdir()
    index.put([entry(1, vectors[1], "second")])  # stored, and found by its vector, until the text index can follow
    assert index.num_chunks == 2
    assert len(index.dense(vectors[1], 2, None)) == 2
    index._sync.sparse.folder.mkdir()
    index.close()
    index = EmbeddedIndex(tmp_path)
    index.check()
    assert index.sparse("second", 1, None)
    assert index.sparse("first", 1, None)
    index.close()


def _ingest_and_kill(folder: Path, first: int, after_s: float) -> int:
    """The last batch that the process said was committed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.retrieval.ingesting", str(folder), str(first)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    time.sleep(after_s)
    process.kill()
    said = process.stdout.read().split("\n")[:-1]  # a line cut in two was never said
    process.wait()
    return int(said[-1]) if said else first - 1


def _overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
