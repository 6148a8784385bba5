"""What `kvarn cache` does with a folder, also beside a server that uses it: list, verify, clear.

A server finds the packs that were deleted gone, and computes what was in them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvarn.prefix_store.folder import LOCK_FILE
from kvarn.prefix_store.identity import NOTE_FILE
from kvarn.prefix_store.keys import KEY_FILE, CacheKeys, read_keys
from kvarn.prefix_store.pack import SUFFIX, NotAPack, open_pack, read_block, read_digests, read_head
from kvarn.prefix_store.store import ABOUT_FILE


@dataclass(frozen=True, slots=True)
class TenantBlocks:
    """What a folder holds of one model for one tenant; names of both are keyed hashes."""

    model: str  # as its file says, else the hash
    tenant: str
    num_blocks: int
    num_bytes: int
    num_damaged: int = 0  # blocks that are not what was written
    problems: tuple[str, ...] = ()  # of packs that cannot be read


def survey(folder: Path, *, verify: bool = False) -> Iterator[TenantBlocks]:
    """The contents of a folder, tenant by tenant. verify: read every block and compare its MAC."""
    keys = read_keys(folder)
    for path in sorted(folder.glob("*/*/")):
        packs = sorted(path.glob(f"*{SUFFIX}"))
        if packs:
            counts = [_pack_counts(pack, keys, verify=verify) for pack in packs]
            yield TenantBlocks(
                model=_model_name(path.parent),
                tenant=path.name,
                num_blocks=sum(count.num_blocks for count in counts),
                num_bytes=sum(count.num_bytes for count in counts),
                num_damaged=sum(count.num_damaged for count in counts),
                problems=tuple(
                    f"{pack.name}: {one.problem}" for pack, one in zip(packs, counts, strict=True) if one.problem
                ),
            )


def clear(folder: Path, tenant: str | None = None) -> int:
    """Delete what one tenant has, or everything, the key included if no process uses it; the bytes that were freed."""
    if tenant is not None:
        keys = read_keys(folder)
        return 0 if keys is None else sum(map(_remove, folder.glob(f"*/{keys.tenant_tag(tenant).hex()}/")))
    freed = sum(_remove(path) for path in folder.glob("*/") if _is_ours(path))
    with suppress(FileNotFoundError):
        (folder / NOTE_FILE).unlink()
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            (folder / KEY_FILE).unlink()
    except BlockingIOError:
        pass  # a process goes on with this key
    finally:
        os.close(descriptor)
    return freed


@dataclass(frozen=True, slots=True)
class _PackCounts:
    num_bytes: int
    num_blocks: int = 0
    num_damaged: int = 0
    problem: str = ""


def _pack_counts(path: Path, keys: CacheKeys | None, *, verify: bool) -> _PackCounts:
    num_bytes = 0
    try:
        num_bytes = path.lstat().st_size
        if keys is None:
            return _PackCounts(num_bytes, problem="there is no key")
        descriptor = open_pack(path)
        try:
            head = read_head(descriptor, keys)
            slots = read_digests(descriptor, head)
            key = keys.block_key(head.model_tag, head.tenant_tag)
            bad = [d for d, slot in slots.items() if verify and read_block(descriptor, head, slot, d, key) is None]
            return _PackCounts(num_bytes, len(slots), len(bad))
        finally:
            os.close(descriptor)
    except (OSError, NotAPack) as error:
        return _PackCounts(num_bytes, problem=str(error))


def _model_name(folder: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / ABOUT_FILE).read_bytes())["model"])
    return folder.name


def _is_ours(path: Path) -> bool:
    """Whether a folder has a name that we give; others are left alone."""
    return len(path.name) == 32 and set(path.name) <= set("0123456789abcdef") and not path.is_symlink()


def _remove(folder: Path) -> int:
    freed = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return freed
