"""A folder and the documents of a collection in step: new, changed, moved and deleted files. Knows files and ids.

    scan -> digests of new and changed files -> which documents there should be -> rename, remove, add

A document's id is its path. Of equal files the first by name is stored. A moved file keeps its chunks and vectors. A
crash at any point is repaired by the next run: what was read last time is remembered only after it was stored.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.errors import ConfigError, DocumentError
from kvarn.retrieval.ingest.files import read_file
from kvarn.retrieval.ingest.folder_scan import FolderScan, Stamp, scan_folder, stamp_of
from kvarn.retrieval.ingest.synced_files import SyncedFiles
from kvarn.retrieval.types import AddReport, Document

if TYPE_CHECKING:
    from kvarn.retrieval.collection import Collection, OnAdded

SETTLED_NS = 2_000_000_000  # a file that changed less than that before it was read may change again unnoticed
MAX_READS = 3
MAX_KEPT_CHARS = 64_000_000  # of texts that need not be read a second time
MIN_GUARDED = 10  # documents; of so many or more, not more than half are removed without being told to


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync has changed, and what it has left out."""

    added: AddReport = field(default_factory=AddReport)
    moved: Mapping[str, str] = field(default_factory=dict)  # old id -> new id
    removed: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)  # id -> id of the equal document that is stored
    failed: Mapping[str, str] = field(default_factory=dict)  # id -> why it could not be read
    skipped: Mapping[str, str] = field(default_factory=dict)  # path -> why it is left out

    @property
    def has_changes(self) -> bool:
        return bool(self.added.added or self.added.updated or self.moved or self.removed)


@dataclass(slots=True)
class _FolderContent:
    """What the files of a folder hold."""

    digests: dict[str, bytes] = field(default_factory=dict)  # id -> digest of what can be indexed
    stamps: dict[str, Stamp] = field(default_factory=dict)  # of files that had settled when they were read
    texts: dict[str, Document] = field(default_factory=dict)  # some of those that were read
    failed: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # ids whose files cannot be read now: what is stored stays

    def entries(self) -> dict[str, tuple[Stamp, bytes]]:
        """What is to be remembered."""
        return {id_: (stamp, self.digests[id_]) for id_, stamp in self.stamps.items() if id_ in self.digests}


def sync_folder(
    collection: Collection, folder: str | os.PathLike[str], *, force: bool = False, on_added: OnAdded | None = None
) -> SyncReport:
    """Bring the documents of a folder in step with its files. force: also if most of them are to be removed."""
    root = Path(folder)
    identity = folder_identity(root)
    scan, known = scan_folder(root), SyncedFiles(collection.folder)
    renamed, stale, stored = _by_this_name(collection, root, known)
    read = _read_all(root, scan, stored, known)
    unlisted = {_id(root / name) for name in scan.unlisted}
    read.kept |= {id_ for id_ in stored if not unlisted.isdisjoint(places_of(id_))}
    wanted, duplicates = _wanted(read.digests)
    moves = _moves(stored, wanted, read.kept)
    gone = sorted(set(stored) - set(wanted) - set(moves) - read.kept)
    failed = {_id(root / name): f"{_id(root / name)}: {why}" for name, why in scan.unlisted.items()}
    if not force:
        failed |= (unmounted := _emptied(root, scan.empty, gone))
        gone = [id_ for id_ in gone if unmounted.keys().isdisjoint(places_of(id_))]
        _require_plausible(root, scan, (len(stored), len(gone)))
    if folder_identity(root) != identity:
        raise ConfigError(f"{root} was unmounted or replaced while it was read; nothing was changed. Sync again")
    collection.rename(renamed)
    moved = collection.rename(moves)
    collection.delete([*stale, *(id_ for id_ in gone if id_ not in moves.values())])
    stored = collection.files_below(_id(root))
    changed = [id_ for id_ in wanted if stored.get(id_) != wanted[id_]]
    report = collection.add(_documents(changed, read), on_added=on_added) if changed else AddReport()
    known.remember(root, lambda id_: id_ in renamed or _id(root) in places_of(id_), read.entries())
    told = {old: moved.get(new, new) for old, new in renamed.items() if new not in gone} | {
        old: new for old, new in moved.items() if old not in renamed.values()
    }
    return SyncReport(
        report, told, (*stale, *gone), duplicates | dict(report.duplicates), failed | read.failed, scan.skipped
    )


def _by_this_name(
    collection: Collection, root: Path, known: SyncedFiles
) -> tuple[dict[str, str], list[str], dict[str, bytes]]:
    """Documents to rename as the folder had another name before, those that are there by both names, and all."""
    stored, renamed, stale = dict(_files_below(collection, root)), {}, []
    for old, new in known.other_names(root).items():
        for id_, digest in _files_below(collection, Path(old)):
            name = (Path(new) / Path(id_).relative_to(old)).as_posix()
            stored.pop(id_, None)
            if name in stored:
                stale.append(id_)
            else:
                renamed[id_], stored[name] = name, digest
    return renamed, stale, stored


def _files_below(collection: Collection, root: Path) -> Iterator[tuple[str, bytes]]:
    """Documents of files in a folder, without those whose paths lead out of it again: docs/../other.txt."""
    for id_, digest in collection.files_below(_id(root)).items():
        if ".." not in Path(id_).relative_to(root).parts:
            yield id_, digest


def places_of(id_: str) -> Iterator[str]:
    """A path and the folders that it is in; "." of relative paths that do not leave it."""
    yield id_
    place = id_
    while "/" in place:
        place = place.rpartition("/")[0]
        yield place or "/"
    if place and place != "..":
        yield "."


def folder_identity(root: Path) -> tuple[int, int]:
    """What a folder is, whatever it holds: another one is there when a disk was unmounted."""
    try:
        status = root.stat()
    except OSError:
        status = None
    if status is None or not root.is_dir():
        raise ConfigError(f"{root} is no folder, or not mounted; nothing was changed. Give a folder that exists")
    return status.st_dev, status.st_ino


def _read_all(root: Path, scan: FolderScan, stored: Mapping[str, bytes], known: SyncedFiles) -> _FolderContent:
    read, num_chars = _FolderContent(), 0
    for name, stamp in scan.files.items():
        id_ = _id(root / name)
        if (digest := known.digest(id_, stamp)) is not None:
            read.digests[id_], read.stamps[id_] = digest, stamp
            continue
        document = _read_one(root / name, id_, read)
        if document is None:
            continue
        digest = document.digest
        read.digests[id_] = digest
        if stored.get(id_) != digest and num_chars + len(document.text) <= MAX_KEPT_CHARS:
            read.texts[id_] = document
            num_chars += len(document.text)
    return read


def _read_one(path: Path, id_: str, read: _FolderContent) -> Document | None:
    """A file that did not change while it was read; None if it cannot be read, with the reason.

    One that was listed and is not there any more may be on a disk that was unmounted: the next scan decides.
    """
    try:
        for _ in range(MAX_READS):
            before = stamp_of(path.stat())
            document = read_file(path)
            if before == stamp_of(path.stat()):
                if time.time_ns() - before[1] > SETTLED_NS:
                    read.stamps[id_] = before
                return document
        read.failed[id_] = f"{id_}: changes while it is read; sync again when it rests"
    except OSError as error:
        read.failed[id_] = f"{id_}: cannot be read: {error.strerror}"
    except DocumentError as error:
        read.failed[id_] = str(error)
        if not isinstance(error.__cause__, OSError):
            return None  # there is no text in it: what it held before is gone
    read.kept.add(id_)
    return None


def _wanted(digests: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
    """The documents there should be, each content once; and which files equal them."""
    first: dict[bytes, str] = {}
    for id_, digest in sorted(digests.items()):
        first.setdefault(digest, id_)
    duplicates = {id_: first[digest] for id_, digest in digests.items() if first[digest] != id_}
    return {id_: digest for digest, id_ in first.items()}, duplicates


def _moves(stored: Mapping[str, bytes], wanted: Mapping[str, bytes], kept: set[str]) -> dict[str, str]:
    """Documents whose content is now under another name: old id -> new id."""
    by_digest = {digest: id_ for id_, digest in stored.items() if wanted.get(id_) != digest and id_ not in kept}
    missing = [(id_, digest) for id_, digest in wanted.items() if stored.get(id_) != digest and id_ not in kept]
    return {by_digest[digest]: id_ for id_, digest in missing if digest in by_digest}


def _documents(ids: list[str], read: _FolderContent) -> Iterator[Document]:
    """The documents of files, read again where their texts were not kept."""
    for id_ in ids:
        document = read.texts.pop(id_, None) or _read_one(Path(id_), id_, read)
        if document is not None:
            read.digests[id_] = document.digest
            yield document


def _emptied(root: Path, empty: Iterable[str], gone: list[str]) -> dict[str, str]:
    """Folders within the root that held documents and hold nothing now, as a disk that is not mounted; and why."""
    counts = Counter(place for id_ in gone for place in places_of(id_))
    folders = [_id(root / name) for name in empty if name and counts[_id(root / name)] >= MIN_GUARDED]
    why = "is empty, and its {:,} documents stay; check that it is mounted, or use --force"
    return {folder: f"{folder}: {why.format(counts[folder])}" for folder in folders}


def _require_plausible(root: Path, scan: FolderScan, counts: tuple[int, int]) -> None:
    """Refuse to remove what may only be out of sight, such as files on a disk that is not mounted."""
    num_stored, num_gone = counts
    if not num_gone or (scan.files and (num_stored < MIN_GUARDED or 2 * num_gone <= num_stored)):
        return
    what = "holds no files that could be indexed" if not scan.files else "has lost most of its files"
    raise ConfigError(
        f"{root} {what}: {num_gone:,} of {num_stored:,} documents would be removed, and nothing was changed; "
        "check that it is mounted, or use --force"
    )


def _id(path: Path) -> str:
    return path.as_posix()
