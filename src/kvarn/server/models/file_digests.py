"""The SHA-256 of weight files, noted in Kvarn's home: hashing gigabytes at every start would cost seconds.

A note holds as long as the file has its device, inode, size and times of change. Clients see a digest as the model's
fingerprint; nothing is trusted because of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from kvarn.config import kvarn_home
from kvarn.prefix_store.identity import file_stamp

NOTE_FILE = "digests.json"
MAX_NOTES = 256


def file_digest(path: Path) -> str:
    """Of a file's bytes: the noted one, or read and noted now. Blocks; OSError where it cannot be read."""
    stamp = file_stamp(path)
    if (known := _read_notes().get(stamp)) is not None:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if file_stamp(path) == stamp:
        _note(stamp, digest)
    return digest


def _read_notes() -> dict[str, str]:
    """None where the file is missing or is not a table of digests."""
    with suppress(OSError, ValueError):
        notes = json.loads((kvarn_home() / NOTE_FILE).read_bytes())
        if isinstance(notes, dict):
            return {str(stamp): digest for stamp, digest in notes.items() if _is_digest(digest)}
    return {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _note(stamp: str, digest: str) -> None:
    """Without effect where the folder cannot be written: the next start hashes again."""
    notes = dict(list(_read_notes().items())[1 - MAX_NOTES :]) | {stamp: digest}
    path = kvarn_home() / NOTE_FILE
    draft = path.with_name(f".{NOTE_FILE}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(notes), encoding="utf-8")
        draft.replace(path)
