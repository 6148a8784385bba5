"""multipart/form-data, as clients send files with it. Knows bytes; what a part means is known to its route."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvarn.server.failures import BadBody, UnsupportedMediaType

MAX_PARTS = 16
MAX_PART_HEAD = 8192  # bytes
_BOUNDARY = re.compile(r'multipart/form-data\s*;\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*', re.IGNORECASE)
_PARAMETER = re.compile(r'(?<![\w*])(name|filename)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field of a form."""

    name: str
    filename: str | None
    data: bytes


def boundary_of(content_type: str) -> bytes:
    """What stands between the parts, or UnsupportedMediaType."""
    match = _BOUNDARY.fullmatch(content_type.strip())
    if match is None:
        raise UnsupportedMediaType(f"the content type is {content_type[:80] or 'missing'}; send multipart/form-data")
    return (match[1] or match[2]).encode("latin-1")


def parse_form(data: bytes, boundary: bytes) -> dict[str, FormPart]:
    """The parts by name, or BadBody."""
    pieces = (b"\r\n" + data).split(b"\r\n--" + boundary, MAX_PARTS + 2)
    if len(pieces) < 3 or len(pieces) > MAX_PARTS + 2 or not pieces[-1].startswith(b"--"):
        raise BadBody(f"the form is not complete, or has more than {MAX_PARTS} parts; send it again")
    parts: dict[str, FormPart] = {}
    for piece in pieces[1:-1]:
        part = _part(piece)
        if part.name in parts:
            raise BadBody(f"the form has {part.name[:80]!r} twice; send it once")
        parts[part.name] = part
    return parts


def _part(piece: bytes) -> FormPart:
    head, found, data = piece.partition(b"\r\n\r\n")
    if not found or len(head) > MAX_PART_HEAD:
        raise BadBody("a part of the form has no head, or one that is too long")
    lines = head.decode("utf-8", "replace").split("\r\n")
    disposition = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
    named = {name: re.sub(r"\\(.)", r"\1", value) for name, value in _PARAMETER.findall(disposition)}
    if "name" not in named:
        raise BadBody("a part of the form has no name; send `file` and `purpose`")
    return FormPart(named["name"], named.get("filename"), data)
