"""What the files of synced folders were like when they were read last, in one JSON file beside the documents.

A cache: without it all files are read again. Knows ids and stamps; reads none of the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvarn.retrieval.ingest.folder_scan import Stamp

FILE = "synced-files.json"
Entry = tuple[Stamp, bytes]  # what a file was like, and the digest of what it held
log = logging.getLogger("kvarn.retrieval")


class SyncedFiles:
    """The files of all folders that are synced into one collection, by id."""

    def __init__(self, folder: Path | None) -> None:
        """folder: of the collection; None if it has none, and nothing is remembered."""
        self._path = None if folder is None else folder / FILE
        self._entries = {} if self._path is None else _load(self._path)

    def digest(self, id_: str, stamp: Stamp) -> bytes | None:
        """Of what a file holds, if it is as it was when it was read last."""
        known = self._entries.get(id_)
        return known[1] if known is not None and known[0] == stamp else None

    def remember(self, is_below: Callable[[str], bool], found: Mapping[str, Entry]) -> None:
        """Replace what is known of the files below a folder; written only if that is something else."""
        entries = {id_: entry for id_, entry in self._entries.items() if not is_below(id_)} | dict(found)
        if entries == self._entries or self._path is None:
            return
        self._entries = entries
        partial = self._path.with_suffix(".part")
        try:
            partial.write_text(
                json.dumps({id_: (*stamp, digest.hex()) for id_, (stamp, digest) in entries.items()}), encoding="utf-8"
            )
            partial.replace(self._path)
        except OSError as error:  # a full disk: the documents are stored, and the next sync reads their files again
            log.warning("%s cannot be written (%s); the next sync reads all files again", self._path, error.strerror)
            with suppress(OSError):
                partial.unlink()


def _load(path: Path) -> dict[str, Entry]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {id_: ((size, at, inode), bytes.fromhex(digest)) for id_, (size, at, inode, digest) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
