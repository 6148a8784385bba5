"""Blocks on disk: what was written comes back in another process, or nothing does; never anything else."""

from __future__ import annotations

import os
import stat
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvarn.prefix_store.failures import StoreUnavailable
from kvarn.prefix_store.folder import StoreFolder
from kvarn.prefix_store.identity import BlockIdentity
from tests.unit.prefix_store.stores import (
    BLOCK_BYTES,
    block,
    blocks,
    closed,
    digest,
    has,
    opened,
    packs,
    size_on_disk,
)

IDENTITY = BlockIdentity("sha256", "spec", "f16", 16, BLOCK_BYTES, "native avx2 1234", "q8_0 packed")


def test_what_was_written_is_there_in_the_next_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.append(blocks(range(20))) == 20
    closed(store)
    store = opened(tmp_path)
    assert len(store) == 20
    assert all(has(store, number) for number in range(20))
    assert not has(store, 20)
    assert store.count([digest(number) for number in (0, 1, 2, 99, 3)]) == 3


def test_a_block_is_written_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert [store.append(blocks([1, 2])), store.append(blocks([1, 2, 3]))] == [2, 1]
    assert len(store) == 3


def test_only_the_owner_may_read_a_folder_and_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    opened(folder).append(blocks([1]))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert set(modes.values()) == {0o700, 0o600}
    assert modes["key"] == 0o600


@pytest.mark.parametrize("name", [field.name for field in fields(BlockIdentity)])
def test_a_block_of_another_identity_is_a_miss(tmp_path: Path, name: str) -> None:
    store = opened(tmp_path, identity=IDENTITY.digest())
    store.append(blocks([1]))
    closed(store)
    other = {name: 99 if isinstance(getattr(IDENTITY, name), int) else "other"}
    store = opened(tmp_path, identity=replace(IDENTITY, **other).digest())
    assert len(store) == 0
    assert not has(store, 1)
    closed(store)
    assert has(opened(tmp_path, identity=IDENTITY.digest()), 1)


def test_a_pack_that_is_moved_to_another_model_or_tenant_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append([*blocks([1], "a"), *blocks([2], "b")])
    closed(store)
    first, second = packs(tmp_path)
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    store = opened(tmp_path)
    assert has(store, 1)  # whose folder it lies in says nothing, its head does
    closed(store)
    other = opened(tmp_path, identity=b"another model")
    other.append(blocks([9]))
    closed(other)
    target = next(path for path in packs(tmp_path) if path not in (first, second))
    target.write_bytes(swapped[0])
    assert len(opened(tmp_path, identity=b"another model")) == 0


def test_tenants_have_packs_of_their_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append([*blocks([1], "a"), *blocks([2], "b"), *blocks([3], "a\0salt")])
    assert len({path.parent for path in packs(tmp_path)}) == 2
    assert not [path for path in tmp_path.rglob("*") if path.name in ("a", "b")]


@pytest.mark.parametrize("max_bytes", [300_000, 900_000])
def test_the_limit_of_bytes_holds_after_each_write(tmp_path: Path, max_bytes: int) -> None:
    store = opened(tmp_path, max_bytes)
    for first in range(0, 300, 5):
        store.append(blocks(range(first, first + 5), tenant=str(first % 3)))
        assert size_on_disk(tmp_path) <= max_bytes
    assert len(store) > max_bytes / BLOCK_BYTES / 3
    assert has(store, 299)
    assert not has(store, 0)
    closed(store)
    store = opened(tmp_path, max_bytes // 2)
    assert size_on_disk(tmp_path) <= max_bytes // 2


def test_what_is_used_stays_and_a_chain_loses_its_end_first(tmp_path: Path) -> None:
    store = opened(tmp_path, 400_000)  # packs of 12 blocks
    chain = list(range(30))
    store.append(blocks(chain))
    for first in range(100, 200, 5):
        store.touch([digest(number) for number in chain])
        store.append(blocks(range(first, first + 5)))
    assert store.count([digest(number) for number in chain]) == 30
    for first in range(200, 260, 5):
        store.append(blocks(range(first, first + 5)))
        left = [number for number in chain if digest(number) in store]
        assert left == chain[: len(left)]
    assert len(left) < 30


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be used: Not a directory"):
        StoreFolder(tmp_path / "file" / "cache")


def test_a_key_that_is_none_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"something else")
    with pytest.raises(StoreUnavailable, match="is not the key of a prefix cache; run `kvarn cache clear`"):
        StoreFolder(tmp_path)
    assert (tmp_path / "key").read_bytes() == b"something else"


def test_with_another_key_everything_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append(blocks([1]))
    closed(store)
    (tmp_path / "key").unlink()
    store = opened(tmp_path)
    assert len(store) == 0
    assert not has(store, 1)


def test_a_folder_deleted_under_a_process_is_a_miss_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    store = opened(folder)
    store.append(blocks([1, 2]))
    os.system(f"rm -r {folder}")
    assert not has(store, 1)
    assert store.append(blocks([3])) == 0
    assert store.append(blocks([4])) == 0
    assert caplog.text.count("is gone") == 1
    assert not folder.exists()


def test_packs_deleted_under_a_process_are_written_anew(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append(blocks([1, 2]))
    for pack in packs(tmp_path):
        pack.unlink()
    assert not has(store, 1)
    assert store.append([block(1), block(3)]) == 2
    assert has(store, 1)
    closed(store)
    store = opened(tmp_path)
    assert has(store, 3)
