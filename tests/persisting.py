"""Engines with a prefix cache on disk, one after another over the same folder, as processes would be."""

from __future__ import annotations

from pathlib import Path

from kvarn.backends.protocol import BlockBytesBackend
from kvarn.engine.engine import Engine
from kvarn.engine.persistence.disk_prefixes import DiskPrefixes
from kvarn.prefix_store.folder import StoreFolder
from kvarn.prefix_store.store import BlockStore

HASH_KEY_BYTES = 32


def hash_key(folder: Path) -> bytes:
    """For KVCache: that of the folder, which is made if need be."""
    opened = StoreFolder(folder, 1 << 30)
    try:
        return opened.keys.hash_key
    finally:
        opened.close()


def keep_on_disk(engine: Engine, folder: Path, max_bytes: int = 1 << 30) -> DiskPrefixes:
    """Attach a folder; nothing is written before close(), which writes all."""
    assert isinstance(engine.backend, BlockBytesBackend)
    disk = DiskPrefixes(engine.kv, engine.backend, StoreFolder(folder, max_bytes))
    identity = engine.backend.kernel_identity().encode()
    disk.open(BlockStore(disk.folder, identity, disk.block_bytes, {"model": "test"}))
    engine.scheduler.prefix_reuse.keep_on(disk)
    return disk


def close(disk: DiskPrefixes) -> None:
    """The end of a process that had the time to write."""
    disk.close()
    disk.folder.close()
