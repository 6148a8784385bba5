"""Damaged, cut, foreign, older and newer packs, and a process killed at any point of a write: a miss or the block."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn.prefix_store import pack as pack_module
from tests.conftest import Size
from tests.unit.prefix_store.stores import blocks, closed, digest, has, opened, packs

KILLED = 9
SMALL = 400_000  # packs of 12 blocks


def one_pack(folder: Path, count: int = 5) -> Path:
    store = opened(folder, SMALL)
    store.append(blocks(range(count)))
    closed(store)
    (path,) = packs(folder)
    return path


def found_after(folder: Path, count: int = 5) -> list[bool]:
    """Which blocks come back in a new process; that none is another one is asserted by has()."""
    store = opened(folder, SMALL)
    try:
        return [has(store, number) for number in range(count)]
    finally:
        closed(store)


def test_a_flipped_byte_costs_at_most_the_pack_and_never_gives_another_block(tmp_path: Path, size: Size) -> None:
    path = one_pack(tmp_path, 3)
    content = path.read_bytes()
    assert len(content) < 1 << 16
    lost = 0
    for position in range(0, len(content), size(97, 1)):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([content[position] ^ (1 << position % 8)]))
        found = found_after(tmp_path, 3)
        lost += found.count(False)
        with path.open("r+b") as file:
            file.seek(position)
            file.write(content[position : position + 1])
    assert lost
    assert all(found_after(tmp_path, 3))


def test_a_cut_pack_gives_the_blocks_before_the_cut(tmp_path: Path, size: Size) -> None:
    path = one_pack(tmp_path)
    content = path.read_bytes()
    for length in range(0, len(content), size(1021, 64)):
        path.write_bytes(content[:length])
        found = found_after(tmp_path)
        assert found == sorted(found, reverse=True)
    path.write_bytes(content)
    assert all(found_after(tmp_path))


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\0" * 20_000, b"GGUF" * 5000, os.urandom(20_000), b"KVARNPFX" + b"\xff" * 20_000],
    ids=["empty", "one byte", "zeros", "another format", "noise", "a huge head"],
)
def test_a_foreign_file_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = one_pack(tmp_path)
    (path.parent / "foreign.pack").write_bytes(content)
    assert all(found_after(tmp_path))


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_an_older_or_newer_version_is_left_out_with_a_line(
    tmp_path: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = one_pack(tmp_path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", version))
    assert not any(found_after(tmp_path))
    assert f"a pack is left out: it has version {version}, this is 1" in caplog.text


def test_things_that_are_no_files_are_left_out(tmp_path: Path) -> None:
    path = one_pack(tmp_path)
    os.mkfifo(path.parent / "fifo.pack")
    (path.parent / "folder.pack").mkdir()
    (path.parent / "link.pack").symlink_to(path)
    assert all(found_after(tmp_path))


def test_a_clock_that_went_back_changes_only_what_goes_first(tmp_path: Path) -> None:
    path = one_pack(tmp_path)
    os.utime(path, (0, 0))
    assert all(found_after(tmp_path))
    os.utime(path, (4e9, 4e9))
    assert all(found_after(tmp_path))


def test_a_process_killed_at_any_point_of_a_write_loses_at_most_what_it_wrote(tmp_path: Path) -> None:
    before = 0
    for point in range(100):
        folder = tmp_path / str(point)
        one_pack(folder, 2)
        if not _is_killed(lambda folder=folder: _write_more(folder), point):  # type: ignore[misc]
            break
        found = found_after(folder, 8)
        assert found[:2] == [True, True]
        assert found[2:] == sorted(found[2:], reverse=True)
        before = max(before, found.count(True))
    assert point > 15
    assert before == 8  # the last points lie behind the entries


def _write_more(folder: Path) -> None:
    store = opened(folder)
    store.append(blocks(range(2, 5)))
    store.append(blocks(range(5, 8)))


def _is_killed(work: Callable[[], None], point: int) -> bool:
    """Run in a process that is killed at its point-th write, halfway through; False: there were fewer."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1_000_000))
        write = pack_module._write

        def half(descriptor: int, content: bytes | memoryview, offset: int) -> None:
            view = memoryview(content).cast("B")
            for part in (view[: len(view) // 2], view[len(view) // 2 :]):
                if next(calls) == point:
                    os._exit(KILLED)
                write(descriptor, part, offset)
                offset += len(part)

        def counted(function: Callable[..., None]) -> Callable[..., None]:
            def call(*args: int) -> None:
                if next(calls) == point:
                    os._exit(KILLED)
                function(*args)

            return call

        pack_module._write = half
        os.ftruncate, os.fdatasync, os.fsync = map(counted, (os.ftruncate, os.fdatasync, os.fsync))  # type: ignore[assignment]
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def test_a_full_disk_is_a_miss_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    store.append(blocks([0]))
    ((file, _pack),) = store._open_packs.values()
    full, path = Path("/dev/full"), file.path
    file.path = full  # every write there fails with ENOSPC
    assert store.append(blocks([1, 2])) == 0
    file.path = path
    assert store.append(blocks([3])) == 0  # not at once
    assert caplog.text.count("blocks could not be written: No space left on device") == 1
    assert has(store, 0)
    assert digest(1) not in store
