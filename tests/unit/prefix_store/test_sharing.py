"""One folder, several users: models of one process, and processes, of which one writes at a time."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvarn.config import EngineConfig
from kvarn.engine.persistence.open_store import PrefixFolder
from kvarn.prefix_store import folder as folder_module
from kvarn.prefix_store.folder import NOTE_BYTES, StoreFolder
from kvarn.prefix_store.store import BlockStore
from tests.unit.prefix_store.stores import BLOCK_BYTES, blocks, closed, has, opened, packs, size_on_disk

NOBODY = 65534


class SlowFolder(StoreFolder):
    """One whose users are interrupted where room was made and is not taken yet."""

    def make_room(self, num_bytes: int) -> bool:
        found = super().make_room(num_bytes)
        time.sleep(0.002)
        return found


def size_of(pack: Path) -> int:
    try:
        return pack.stat().st_size
    except FileNotFoundError:  # it gave way to another's
        return 0


def test_models_that_share_a_folder_keep_its_limit_together(tmp_path: Path) -> None:
    folder, max_bytes = SlowFolder(tmp_path, 400_000), 400_000
    start, sizes = threading.Barrier(3), list[int]()

    def write(name: int) -> int:
        store = BlockStore(folder, str(name).encode(), BLOCK_BYTES, {})
        start.wait()
        for first in range(1000 * name, 1000 * name + 240, 12):  # a pack each
            store.append(blocks(range(first, first + 12), tenant=str(first % 5)))
            sizes.append(sum(map(size_of, packs(tmp_path))))
        return store.num_written

    with ThreadPoolExecutor(3) as threads:
        assert min(threads.map(write, range(3))) > 100
    assert max(sizes) <= max_bytes - NOTE_BYTES
    assert folder.num_bytes <= max_bytes
    assert not folder.failures.num_failures


def test_a_second_process_reads_and_does_not_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    first.append(blocks([1]))
    second = opened(tmp_path)
    assert "another process writes" in caplog.text
    assert has(second, 1)
    assert second.append(blocks([2])) == 0
    assert first.append(blocks([2])) == 1
    closed(first)
    closed(second)
    assert not opened(tmp_path).folder.is_read_only


def test_a_second_process_with_a_lower_limit_deletes_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.append(blocks(range(100)))
    second = opened(tmp_path, 300_000)
    assert second.append(blocks([200])) == 0
    assert all(has(store, number) for number in range(100) for store in (first, second))


def test_a_second_process_writes_once_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    first.append(blocks([1]))
    second = opened(tmp_path)
    first.append(blocks([2, 3]))
    monkeypatch.setattr(folder_module, "LOCK_AGAIN_S", 0.0)
    second.folder._locks_again_at = 0.0
    assert second.append(blocks([4])) == 0
    closed(first)
    assert second.append(blocks([4])) == 1
    assert [has(second, number) for number in range(1, 5)] == [True] * 4
    assert caplog.text.count("has ended; this one writes now") == 1
    assert second.folder.num_bytes <= size_on_disk(tmp_path)
    closed(second)
    assert len(opened(tmp_path)) == 4


def test_a_second_process_does_not_write_with_a_key_that_was_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    first.append(blocks([1]))
    second = opened(tmp_path)
    closed(first)
    (tmp_path / "key").unlink()
    closed(opened(tmp_path))
    second.folder._locks_again_at = 0.0
    assert second.append(blocks([2])) == 0
    assert "is gone (its key was replaced)" in caplog.text
    assert len(packs(tmp_path)) == 1


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A folder of this user's with blocks in it that the system lets nobody write to."""
    with tempfile.TemporaryDirectory(prefix="kvarn-forbidden-") as name:
        folder, user = Path(name), os.geteuid()
        if user == 0:  # who may do everything
            folder.chmod(0o755)
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        (cache := folder / "cache").mkdir()
        closed_store(cache)
        modes = {path: path.stat().st_mode for path in [cache, *cache.rglob("*")]}
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        try:
            yield cache
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
            os.seteuid(user)


def closed_store(folder: Path) -> None:
    store = opened(folder)
    store.append(blocks([1]))
    closed(store)


def test_a_read_only_folder_turns_the_cache_off_with_one_line(
    forbidden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = forbidden.parent / "model.gguf"
    model.write_bytes(b"weights")
    before = size_on_disk(forbidden)
    assert PrefixFolder.of(model, EngineConfig(prefix_cache_dir=str(forbidden))) is None
    assert PrefixFolder.of(model, EngineConfig(prefix_cache_dir=str(forbidden / "inner"))) is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(
        "prefix cache on disk is off: " in line and "cannot be used: Permission denied" in line for line in lines
    )
    assert size_on_disk(forbidden) == before
