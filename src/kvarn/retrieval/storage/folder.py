"""The folder of a collection: the lock of the one process that may write to it, and digests of its files."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from kvarn.errors import CollectionLocked, StorageError

FolderLock = BaseFileLock
LOCK = "writer.lock"
MUTABLE = ("meta.json", ".managed.json")  # rewritten in place; everything else in a BM25 folder is written once


def lock_for_writing(folder: Path) -> FolderLock:
    """Take the writer's lock of a folder, which is created if it does not exist; StorageError if another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise CollectionLocked(
            f"the collection in {folder} is being changed by another process, perhaps a server; "
            "go through that one, or wait until it has ended"
        ) from None
    except OSError as error:
        what = "is read-only" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "cannot be written"
        raise StorageError(f"{folder} {what}: {error.strerror}; choose another folder or change its rights") from error
    return lock


def file_digest(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


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
    """Whether the files have these digests, and those that are gone are of segments that were merged away."""
    found = {name for name in digests if (folder / name).is_file()}
    if not (digests.keys() - found).isdisjoint(_used_files(folder, digests)):
        return False
    try:
        return all(file_digest(folder / name) == digests[name] for name in found)
    except FileNotFoundError:  # merged away in this moment
        return is_intact(folder, digests)


def _used_files(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Which of some files of a BM25 index are of the segments that it has now: ID.KIND, ID.NUMBER.del of removals."""
    try:
        listed = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["segments"]
        segments = {one["segment_id"].replace("-", ""): (one["deletes"] or {}).get("opstamp") for one in listed}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged, which is seen when it is opened
        return
    for name in names:
        segment, _, kind = name.partition(".")
        if segment in segments and (not kind.endswith(".del") or kind == f"{segments[segment]}.del"):
            yield name
