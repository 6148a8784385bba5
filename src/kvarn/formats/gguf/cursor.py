"""A position in a byte buffer that never leaves it: every read is checked first.

Knows little-endian integers and length-prefixed text; does not know what they mean.
"""

from __future__ import annotations

import mmap
import struct

from kvarn.errors import FormatError
from kvarn.formats.mapped_file import DAMAGED

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


class Cursor:
    """Reads forward through a mapped file."""

    __slots__ = ("buffer", "file", "position", "size")

    def __init__(self, buffer: mmap.mmap | bytes, size: int, file: str) -> None:
        self.buffer = buffer
        self.size = size
        self.file = file
        self.position = 0

    @property
    def num_left(self) -> int:
        return self.size - self.position

    def error(self, message: str, offset: int | None = None, *, remedy: str = DAMAGED) -> FormatError:
        """Make the error that names this file and place, and what to do."""
        where = self.position if offset is None else offset
        return FormatError(f"{message}; {remedy}", file=self.file, offset=where)

    def skip(self, num_bytes: int, what: str) -> int:
        """Move past num_bytes and return where they begin."""
        if num_bytes > self.num_left:
            raise self.error(f"{what} needs {num_bytes:,} bytes, the file has {self.num_left:,} left")
        begin = self.position
        self.position += num_bytes
        return begin

    def take(self, num_bytes: int, what: str) -> bytes:
        """Copy the next num_bytes out."""
        begin = self.skip(num_bytes, what)
        return self.buffer[begin : begin + num_bytes]

    def uint32(self, what: str) -> int:
        value: int = _UINT32.unpack_from(self.buffer, self.skip(4, what))[0]
        return value

    def uint64(self, what: str) -> int:
        value: int = _UINT64.unpack_from(self.buffer, self.skip(8, what))[0]
        return value

    def text(self, what: str, max_bytes: int, *, min_bytes: int = 0) -> str:
        """Read a length-prefixed string that must be UTF-8."""
        begin = self.position
        num_bytes = self.uint64(f"the length of {what}")
        if not min_bytes <= num_bytes <= max_bytes:
            raise self.error(f"{what} has {num_bytes:,} bytes, {min_bytes:,} to {max_bytes:,} are allowed", begin)
        try:
            return self.take(num_bytes, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}", begin + 8 + error.start) from error
