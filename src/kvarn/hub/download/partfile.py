"""A file that grows under a `.part` name, hashed as it grows, and gets its own name only when complete.

A `.part` left by an interrupted run is continued; one that hit a full disk is removed to give the space back.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from kvarn.errors import DownloadError

CHUNK_BYTES = 1 << 20

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class PartFile:
    """Write once, from the start or from where an earlier run stopped."""

    def __init__(self, destination: Path, *, resume: bool) -> None:
        self.destination = destination
        self.path = destination.with_name(destination.name + ".part")
        destination.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("r+b" if resume and self.path.exists() else "w+b", buffering=0)
        self._hash = hashlib.sha256()
        self.size = 0
        while chunk := self._file.read(CHUNK_BYTES):
            self._hash.update(chunk)
            self.size += len(chunk)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append bytes; a full disk removes the part and says so."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._cannot_write(error) from error
        self._hash.update(data)
        self.size += len(data)

    def restart(self) -> None:
        """Forget everything written so far."""
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.size = 0

    def finish(self) -> None:
        """Make the content durable and give it its final name."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self.path.replace(self.destination)
        except OSError as error:
            raise self._cannot_write(error) from error

    def discard(self) -> None:
        """Remove the part: its bytes are not worth continuing."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> DownloadError:
        written = self.size
        if error.errno in _DISK_FULL:
            self.discard()
        return DownloadError(
            f"cannot write {self.destination.name} after {written:,} bytes: {error.strerror} "
            f"({self.destination.parent}); free some space or set KVARN_HOME to another disk"
        )


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
