"""Files that keys have uploaded, and those that batches wrote for them: a folder with a limit of bytes.

    ID.data   the bytes      ID.json   what is known of them, written last: without it the file does not exist

Each file has one owner, the fingerprint of a key; nobody else finds it. For any thread; blocks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvarn.errors import ConfigError, StorageQuotaExceeded
from kvarn.server.failures import BatchesUnwritable, UnknownFile

log = logging.getLogger("kvarn.server")
MAX_FILES = 1000  # of one key
MAX_SHARE = 2  # one of several keys may hold 1 / MAX_SHARE of all bytes
MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """What is known of a file."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def told(self) -> dict[str, Any]:
        """As a client sees it."""
        fields = asdict(self)
        del fields["owner"]
        return {"object": "file", **fields, "status": "processed"}


def write_atomically(path: Path, data: bytes) -> None:
    """The whole of it or nothing, also if the machine fails; on a full disk nothing of it is left."""
    part = path.with_name(path.name + ".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> BatchesUnwritable:
    """What clients are told when a file cannot be written; where it lies is for the log."""
    log.error("%s cannot be written: %s", path, error.strerror)
    words = "the server's folder of batches cannot be written"
    return BatchesUnwritable(f"{words}: {error.strerror}; ask its operator to make room, then try again")


class FileStore:
    """The files of one server, oldest first."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = [UploadedFile(**json.loads(path.read_bytes())) for path in folder.glob("*.json")]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"batch_dir {folder} cannot be read: {error}; give another folder") from None
        self._files = {one.id: one for one in sorted(found, key=lambda one: (one.created_at, one.id))}
        self._remove_leftovers()

    def put(self, owner: str, filename: str, purpose: str, data: bytes, file_id: str | None = None) -> UploadedFile:
        """Keep a file, or raise that there is no room; file_id: the place of one that may be there from before."""
        name = filename[:MAX_NAME] or "file"
        stored = UploadedFile(
            file_id or f"file-{secrets.token_hex(12)}", owner, name, purpose, len(data), int(time.time())
        )
        with self._lock:
            self._require_room(owner, len(data))
            write_atomically(self.path(stored), data)
            try:
                write_atomically(self._folder / f"{stored.id}.json", json.dumps(asdict(stored)).encode())
            except BatchesUnwritable:
                self.path(stored).unlink(missing_ok=True)
                raise
            self._files[stored.id] = stored
        return stored

    def get(self, owner: str, file_id: str) -> UploadedFile:
        """The owner's file with this id."""
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            raise UnknownFile("no file with this id is kept for this key; list them with GET /v1/files")
        return found

    def path(self, file: UploadedFile) -> Path:
        return self._folder / f"{file.id}.data"

    def of(self, owner: str) -> list[UploadedFile]:
        """All files of an owner, oldest first."""
        return [one for one in list(self._files.values()) if one.owner == owner]

    def delete(self, owner: str, file_id: str) -> None:
        with self._lock:
            found = self.get(owner, file_id)
            (self._folder / f"{found.id}.json").unlink(missing_ok=True)
            self.path(found).unlink(missing_ok=True)
            del self._files[found.id]

    def require_room(self, owner: str, num_bytes: int) -> None:
        """Raise unless the owner may keep so many bytes more."""
        with self._lock:
            self._require_room(owner, num_bytes)

    def _require_room(self, owner: str, num_bytes: int) -> None:
        own = self.of(owner)
        limit = self._budget_bytes // MAX_SHARE if owner else self._budget_bytes
        if len(own) >= MAX_FILES:
            raise StorageQuotaExceeded(f"this key has {len(own):,} files, at most {MAX_FILES:,} are kept; delete some")
        if (held := sum(one.bytes for one in own)) + num_bytes > limit:
            raise StorageQuotaExceeded(
                f"the files of this key hold {held:,} bytes and {num_bytes:,} more are wanted, "
                f"at most {limit:,} are kept; delete some"
            )
        if sum(one.bytes for one in self._files.values()) + num_bytes > self._budget_bytes:
            raise StorageQuotaExceeded("the server's folder of files is full; delete some, or ask its operator")

    def _remove_leftovers(self) -> None:
        """What was being written when the process ended."""
        for path in self._folder.iterdir():
            is_whole = path.suffix in (".json", ".data") and path.stem in self._files
            if path.is_file() and not is_whole:
                path.unlink()
