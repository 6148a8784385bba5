"""A regular file, mapped read-only: the one way weight files are opened.

Knows sizes and pages; does not know any file format. Refuses everything that is not a regular, non-empty file, or
only stands in for one, and never blocks while opening (a FIFO would). A file that shrinks under a mapping cannot be
read safely, so the size is checked again whenever bytes are handed out, and `verify_unchanged` after the last of them
was copied.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError, ModelNotFound

DAMAGED = "it is truncated or corrupt, download it again"  # what readers of any format say
_POINTER = b"version https://git-lfs."
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class MappedFile:
    """The bytes of one file. Arrays handed out stay valid after close()."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        descriptor = _open_regular(self.path)
        self._release = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.size = status.st_size
        self._modified_ns = status.st_mtime_ns
        self._map: mmap.mmap | None = self._map_whole()
        if self._map[: len(_POINTER)] == _POINTER:
            self.close()
            message = f"this is a Git LFS pointer of {self.size} bytes, not the file itself"
            raise FormatError(f"{message}; run git lfs pull, or download the file", file=self.path)

    def _map_whole(self) -> mmap.mmap:
        if self.size == 0:
            self._release()
            raise FormatError("the file is empty; download it again", file=self.path)
        try:
            return mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            self._release()
            raise FormatError(f"the file cannot be mapped: {error}", file=self.path) from error

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping itself, for parsers."""
        if self._map is None:
            raise FormatError("the file was closed; open it again", file=self.path)
        return self._map

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view of a range that lies inside the file."""
        assert 0 <= offset <= offset + num_bytes <= self.size
        buffer = self.buffer
        if os.fstat(self._descriptor).st_size < offset + num_bytes:
            raise FormatError("the file shrank while it was open; restore it and load again", file=self.path)
        return np.frombuffer(buffer, dtype=np.uint8, count=num_bytes, offset=offset)

    def release_pages(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop the pages that lie wholly inside the (offset, num_bytes) ranges from this process."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        page = mmap.PAGESIZE
        for offset, num_bytes in ranges:
            begin = -(-offset // page) * page
            end = (offset + num_bytes) // page * page
            if begin < end:
                with contextlib.suppress(OSError):  # advice only
                    self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def verify_unchanged(self) -> None:
        """Raise FormatError if the file was resized or rewritten since it was opened."""
        if self._map is None:
            raise FormatError("the file was closed; open it again", file=self.path)
        status = os.fstat(self._descriptor)
        if status.st_size != self.size:
            raise FormatError(
                f"the file changed from {self.size:,} to {status.st_size:,} bytes while it was read; load it again",
                file=self.path,
            )
        if status.st_mtime_ns != self._modified_ns:
            raise FormatError("the file was written to while it was read; load it again", file=self.path)

    def close(self) -> None:
        """Close the file. The mapping itself lives until the last array over it is gone."""
        mapping, self._map = self._map, None
        self._release()
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


def _open_regular(path: str) -> int:
    try:
        _refuse_kind(path, os.stat(path).st_mode)  # before open: opening a device can have effects
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path}: no such file; check the path") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFound(f"{path!r} cannot be opened: {reason}; give the path of a readable file") from error
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode)
    except FormatError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_kind(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")
        raise FormatError(f"this is {kind}, not a model file; give the path of a file", file=path)
