"""What a folder holds: files that can be indexed, what is left out and why, and folders that could not be listed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvarn.retrieval.ingest.files import SKIPPED_FOLDERS, is_known_kind
from kvarn.retrieval.ingest.gitignore import IgnoreFile, ignore_files_above, is_ignored

Stamp = tuple[int, int, int]  # bytes, time of the last change in ns, inode
_Folder = tuple[Path, str, Sequence[IgnoreFile]]  # its name within the root, with a slash; the rules above it
IGNORED = ".gitignore leaves it out"
HIDDEN = "it is hidden"


@dataclass(slots=True)
class FolderScan:
    """Paths are relative to the scanned folder, with slashes."""

    files: dict[str, Stamp] = field(default_factory=dict)  # in order
    skipped: dict[str, str] = field(default_factory=dict)  # path -> why; a folder stands for what is in it
    unlisted: dict[str, str] = field(default_factory=dict)  # what is there and could not be looked at -> why
    empty: list[str] = field(default_factory=list)  # folders with nothing in them, as those on which nothing is mounted


def scan_folder(root: Path) -> FolderScan:
    """Walk a folder; links to folders are not followed, so that there are no loops."""
    scan = FolderScan()
    places: list[_Folder] = [(root, "", ignore_files_above(root))]
    while places:
        places += _scan_one(places.pop(), scan)
    scan.files = dict(sorted(scan.files.items()))
    return scan


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _scan_one(place: _Folder, scan: FolderScan) -> Iterator[_Folder]:
    """Take the files of a folder; gives the folders in it that are to be scanned."""
    path, prefix, ignore = place
    try:
        with os.scandir(path) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        own = IgnoreFile.read(path, prefix)
    except OSError as error:
        scan.unlisted[prefix.rstrip("/")] = error.strerror or str(error)
        return
    ignore = ignore if own is None else (*ignore, own)
    if not entries:
        scan.empty.append(prefix.rstrip("/"))
    for entry in entries:
        name = prefix + entry.name
        reason = _reason(entry, name, ignore)
        if reason is not None:
            scan.skipped[name] = reason
        elif entry.is_dir(follow_symlinks=False):
            yield Path(entry.path), name + "/", ignore
        else:
            _add_file(entry, name, scan)


def _reason(entry: os.DirEntry[str], path: str, ignore: Sequence[IgnoreFile]) -> str | None:
    """Why something in a folder is left out; None if it is not."""
    is_folder = entry.is_dir(follow_symlinks=False)
    if entry.name.startswith("."):
        return HIDDEN
    if is_ignored(path, is_folder, ignore):
        return IGNORED
    if is_folder:
        return "it holds what tools have made" if entry.name in SKIPPED_FOLDERS else None
    if entry.is_symlink() and os.path.isdir(entry.path):
        return "it is a link to a folder"
    if not is_known_kind(entry.name):
        return f"files of the kind {Path(entry.name).suffix or entry.name} are not read"
    return None


def _add_file(entry: os.DirEntry[str], path: str, scan: FolderScan) -> None:
    try:
        status = entry.stat()
    except OSError as error:
        if entry.is_symlink():
            scan.skipped[path] = f"it is a link that leads nowhere: {error.strerror}"
        else:  # it was there a moment ago
            scan.unlisted[path] = error.strerror or str(error)
        return
    if not stat.S_ISREG(status.st_mode):
        scan.skipped[path] = "it is a pipe, a socket or a device"
    else:
        scan.files[path] = stamp_of(status)
