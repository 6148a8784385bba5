"""Paths of collections: one folder each under Kvarn's home, grouped by tenant."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from kvarn.checks import short
from kvarn.config import kvarn_home
from kvarn.errors import CollectionNotFound, InvalidParameter, StorageError
from kvarn.retrieval.storage.document_store import FILE, live_bytes, require_file
from kvarn.retrieval.storage.folder import LOCK, lock_for_writing

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def tenant_folder(tenant: str = "") -> Path:
    """The folder of a tenant's collections; without a tenant, the shared one."""
    home = kvarn_home() / "collections"
    return home / "shared" if not tenant else home / f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def collection_folder(name: str, parent: Path | None = None) -> Path:
    """The folder of one collection, which need not exist. parent: the shared folder by default."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"the collection's name is {short(name)}; use 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            field="name",
        )
    return (parent or tenant_folder()) / name


def existing_folder(name: str, parent: Path | None = None) -> Path:
    """The folder of a collection; CollectionNotFound if it does not exist."""
    folder = _begun_folder(name, parent)
    require_file(folder / FILE)
    return folder


def _begun_folder(name: str, parent: Path | None) -> Path:
    """The folder of a collection that is there, in whatever state."""
    folder = collection_folder(name, parent)
    if not os.path.lexists(folder / FILE):
        known = ", ".join(list_names(parent)) or "none yet"
        raise CollectionNotFound(f"there is no collection {name!r}; there are: {known}")
    return folder


def list_names(parent: Path | None = None) -> list[str]:
    """The names of all collections in a folder."""
    folder = parent or tenant_folder()
    return sorted(path.parent.name for path in folder.glob(f"*/{FILE}") if path.is_file())


def stored_bytes(parent: Path) -> int:
    """What all collections in a folder hold on disk; pages that deleted documents have freed do not count."""
    return sum(_num_bytes(path) for path in parent.glob("*/**/*"))


def _num_bytes(path: Path) -> int:
    if path.name in (f"{FILE}-wal", f"{FILE}-shm"):
        return 0  # counted with the file, and kept small
    try:
        return live_bytes(path) if path.name == FILE else path.stat().st_size if path.is_file() else 0
    except (OSError, StorageError):  # merged away or dropped meanwhile
        return 0


def drop(name: str, parent: Path | None = None) -> None:
    """Remove a collection with everything in it; StorageError while another process has it open for writing."""
    folder = _begun_folder(name, parent)
    for path in (folder / FILE, folder / LOCK):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # not ours, and in the way
    lock = lock_for_writing(folder)
    try:
        (folder / FILE).unlink(missing_ok=True)  # from here on it does not exist
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
