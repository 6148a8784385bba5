"""A file that gets its name when it is whole. Until then it has none, where the system can do that, so that whatever
ends the process, kill -9 included, leaves nothing behind; elsewhere it has a hidden name, which every error removes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import IO

_NAMELESS = getattr(os, "O_TMPFILE", 0)  # Linux, on most file systems
_HIDDEN = ".kvarn-"  # how a name begins that is not the target's, which may be as long as names can be


class NewFile:
    """A file in a folder, open for writing; publish() names it, close() without that discards it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._draft: str | None = None
        self.file: IO[bytes] = self._open_nameless() or self._open_hidden()

    @property
    def path(self) -> Path:
        """Where it can be read, also before it has a name, by this process."""
        self.file.flush()
        return Path(self._draft or f"/proc/self/fd/{self.file.fileno()}")

    def publish(self, target: Path) -> None:
        """Give the file its name, in place of any that has it; the target is on the same file system."""
        self.file.flush()
        os.fsync(self.file.fileno())
        if self._draft is None:
            draft = os.path.join(target.parent, f"{_HIDDEN}{secrets.token_hex(4)}")
            _link(self.file.fileno(), draft, self._folder)
            self._draft = draft
        os.replace(self._draft, target)
        self._draft = None

    def close(self) -> None:
        self.file.close()
        if self._draft is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._draft)

    def _open_nameless(self) -> IO[bytes] | None:
        if not _NAMELESS or not os.path.isdir("/proc/self/fd"):
            return None
        try:
            return os.fdopen(os.open(self._folder, _NAMELESS | os.O_WRONLY, 0o666), "wb")
        except OSError:
            return None  # the file system has no nameless files; if it is something else, the next attempt says so

    def _open_hidden(self) -> IO[bytes]:
        number, self._draft = tempfile.mkstemp(dir=self._folder, prefix=_HIDDEN)
        os.chmod(self._draft, 0o666 & ~umask())  # not the 0600 of temporary files
        return os.fdopen(number, "wb")


def _link(number: int, target: str, folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:  # with a directory Python calls linkat, which alone follows the link to a nameless file
        os.link(f"/proc/self/fd/{number}", target, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def umask() -> int:
    """The permissions that new files of this process do not get."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
