"""The folder of a collection: who may change it, and whether its files are those that were written."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from kvarn.errors import StorageError
from kvarn.retrieval.storage.hnsw import file_digest

FolderLock = BaseFileLock
LOCK = "writer.lock"
MUTABLE = ("meta.json", ".managed.json")  # rewritten in place; everything else in a BM25 folder is written once


def claim(folder: Path) -> FolderLock:
    """Become the one process that may change a folder, making it if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise StorageError(
            f"the collection in {folder} is being changed by another process, perhaps a server; "
            "go through that one, or wait until it has ended"
        ) from None
    except OSError as error:
        what = "is read-only" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "cannot be written"
        raise StorageError(f"{folder} {what}: {error.strerror}; choose another folder or change its rights") from error
    return lock


def file_digests(folder: Path) -> dict[str, str]:
    """Digests of the files that never change once written."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in MUTABLE and not path.name.startswith("."):
            try:
                digests[path.name] = file_digest(path)
            except FileNotFoundError:  # merged away meanwhile
                continue
    return digests


def is_intact(folder: Path, digests: Mapping[str, str]) -> bool:
    """Whether the files that are still there are as they were; merges may have removed some."""
    return all(file_digest(folder / name) == digest for name, digest in digests.items() if (folder / name).is_file())
