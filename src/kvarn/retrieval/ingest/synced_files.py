"""What the files of synced folders were like when they were read last, in one JSON file beside the documents.

A cache: without it all files are read again, and a folder is not known by another name. Reads none of the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvarn.retrieval.ingest.folder_scan import Stamp

FILE = "synced-files.json"
ROOTS = ""  # the key of the folders themselves; no file has such an id
Entry = tuple[Stamp, bytes]  # what a file was like, and the digest of what it held
log = logging.getLogger("kvarn.retrieval")


class SyncedFiles:
    """The files of all folders that are synced into one collection, by id."""

    def __init__(self, folder: Path | None) -> None:
        """folder: of the collection; None if it has none, and nothing is remembered."""
        self._path = None if folder is None else folder / FILE
        self._entries, self._roots = ({}, {}) if self._path is None else _load(self._path)

    def digest(self, id_: str, stamp: Stamp) -> bytes | None:
        """Of what a file holds, if it is as it was when it was read last."""
        known = self._entries.get(id_)
        return known[1] if known is not None and known[0] == stamp else None

    def other_names(self, root: Path) -> dict[str, str]:
        """What a folder, or a part of it, was called when it was synced before -> what it is called now."""
        here, names = root.resolve(), {}
        for name, place in self._roots.items():
            if Path(place).is_relative_to(here):
                names[name] = (root / Path(place).relative_to(here)).as_posix()
            elif here.is_relative_to(place):
                names[(Path(name) / here.relative_to(place)).as_posix()] = root.as_posix()
        return {old: new for old, new in names.items() if old not in (new, ".")}

    def remember(self, root: Path, is_below: Callable[[str], bool], found: Mapping[str, Entry]) -> None:
        """Replace what is known of the files below a folder; written only if that is something else."""
        if self._path is None:
            return
        entries = {id_: entry for id_, entry in self._entries.items() if not is_below(id_)} | dict(found)
        roots = {name: place for name, place in self._roots.items() if name not in self.other_names(root)}
        roots[root.as_posix()] = root.resolve().as_posix()
        if (entries, roots) == (self._entries, self._roots):
            return
        self._entries, self._roots = entries, roots
        partial = self._path.with_suffix(".part")
        kept = {ROOTS: roots} | {id_: (*stamp, digest.hex()) for id_, (stamp, digest) in entries.items()}
        try:
            partial.write_text(json.dumps(kept), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:  # a full disk: the documents are stored, and the next sync reads their files again
            log.warning("%s cannot be written (%s); the next sync reads all files again", self._path, error.strerror)
            with suppress(OSError):
                partial.unlink()


def _load(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The files by id, and where folders were by the names that they were given."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        roots = {str(name): str(place) for name, place in known.pop(ROOTS, {}).items()}
        files = known.items()
        return {id_: ((size, at, inode), bytes.fromhex(digest)) for id_, (size, at, inode, digest) in files}, roots
    except (OSError, ValueError, TypeError, AttributeError):
        return {}, {}
