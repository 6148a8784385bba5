"""Zip archives and the XML in them, both hostile until read: every size is counted while it is unpacked.

Knows no documents. An entity that XML declares is refused, so that no few bytes stand for many.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from xml.parsers import expat

from kvarn.errors import DocumentError

MAX_MEMBERS = 10_000
MAX_UNPACKED_BYTES = 256 << 20  # of all members that are read
PIECE_BYTES = 1 << 16
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what both formats allow
_CENTRAL = b"PK\x01\x02"  # before every name in the list of members
_IS_ENCRYPTED = 1


class Archive:
    """The members of a zip file, by name. what: the kind of file, for error messages."""

    def __init__(self, data: bytes, source: str, what: str) -> None:
        self._source = source
        self._what = what
        self._left = MAX_UNPACKED_BYTES
        if data.count(_CENTRAL) > MAX_MEMBERS:  # before they are listed, which takes memory for each
            raise self.error(f"holds more than {MAX_MEMBERS:,} files; split it")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
            raise self.broken(error) from None

    def __contains__(self, name: str) -> bool:
        return name in self._zip.NameToInfo

    def read(self, name: str) -> bytes:
        """A whole member."""
        return b"".join(self.pieces(name))

    def pieces(self, name: str) -> Iterator[bytes]:
        """A member piece by piece."""
        info = self._zip.NameToInfo.get(name)
        if info is None:
            raise self.error(f"is a broken {self._what} (there is no {name[:100]} in it); save it anew")
        if info.flag_bits & _IS_ENCRYPTED:
            raise self.error("is encrypted; save it without a password first")
        if info.compress_type not in METHODS:
            raise self.error(f"is packed by method {info.compress_type}, which is not read; save it anew")
        try:
            with self._zip.open(info) as member:
                while piece := member.read(PIECE_BYTES):
                    self._left -= len(piece)
                    if self._left < 0:
                        raise self.error(f"unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; split it")
                    yield piece
        except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError, OSError) as error:
            raise self.broken(error) from None

    def error(self, message: str) -> DocumentError:
        return DocumentError(message, source=self._source)

    def broken(self, error: Exception) -> DocumentError:
        reason = " ".join(str(error).split())[:120]
        return self.error(f"is a broken {self._what} ({type(error).__name__}: {reason}); save it anew")


class XmlHandler(Protocol):
    """Takes elements by their names without namespaces."""

    def start(self, name: str, attributes: Mapping[str, str]) -> None: ...

    def end(self, name: str) -> None: ...

    def text(self, data: str) -> None: ...


def parse_xml(archive: Archive, name: str, handler: XmlHandler) -> None:
    """Read a member as XML."""
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True

    def start(tag: str, attributes: dict[str, str]) -> None:
        handler.start(_local(tag), {_local(key): value for key, value in attributes.items()})

    def refuse(*_: Any) -> None:
        raise archive.error("declares entities of XML, which is refused; save it anew")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: handler.end(_local(tag))
    parser.CharacterDataHandler = handler.text
    parser.EntityDeclHandler = refuse
    try:
        for piece in archive.pieces(name):
            parser.Parse(piece, False)
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError) as error:
        raise archive.broken(error) from None


def _local(name: str) -> str:
    return name.rpartition(" ")[2]
