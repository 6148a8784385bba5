"""JSON bodies: of requests, read within the server's limits, and of responses. Knows no fields.

Refused: other types and encodings (415), more bytes than allowed (413, before they are kept), and with 400 everything
that two JSON readers could understand differently: duplicate keys, NaN, numbers out of range, broken text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvarn.errors import shortened
from kvarn.formats.strict_json import MAX_CONTAINERS, parse_value
from kvarn.server.api.schema import MAX_VALUES
from kvarn.server.failures import BadBody, BodyTooLarge, ClientGone, UnsupportedMediaType
from kvarn.server.process.settings import ServerConfig

Payload = Mapping[str, Any] | list[dict[str, Any]]
MAX_MEMBERS = 65_536  # names in all objects together
PIECE_BYTES = 256 << 10  # of a body, looked at in one go
SMALL_BYTES = 16 << 10  # a body that needs no pieces

_NOT_A_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
# Each number is tried once, from its first digit: else one of 4,300 digits would be counted 4,300 times.
_HUGE_NUMBER = re.compile(rb"[eE]\+?\d{3}|(?<!\d)\d{200}")  # without one of these no float is infinite
_LONG_NUMBER = re.compile(rb"(?<!\d)\d{4301}")  # more digits than Python reads
_ODD_ESCAPE = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")  # a surrogate, or NUL
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The bytes of a body that says it is JSON."""
    _check_type(request)
    return await read_bytes(request, config.max_body_bytes)


def parse_body(data: bytes, max_depth: int, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """A JSON object from untrusted bytes, or BadBody with what is wrong with them."""
    if not data:
        raise BadBody("the body is empty; send a JSON object")
    _check_strings(data, max_values)
    text = _decode(data)
    bare = _without_strings(data)
    _check_shape(bare, max_depth, max_values)
    try:
        value = parse_value(text, is_finite=_HUGE_NUMBER.search(bare) is not None)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number or boolean")
        raise BadBody(f"the body is {kind}; send a JSON object")
    if _ODD_ESCAPE.search(data):
        _check_text(value)
    return value


def json_response(content: bytes, headers: Mapping[str, str]) -> Response:
    """A response of JSON that is written already."""
    return Response(content, headers=headers, media_type="application/json")


def write_json(payload: Payload, *, in_pieces: bool = False) -> bytes:
    """JSON for any payload: half of a surrogate pair as its escape; null for a number that JSON does not have.

    in_pieces: for worker threads; the fast encoder would keep every other thread waiting until the last byte.
    """
    encode = _encode_in_pieces if in_pieces else _ENCODER.encode
    try:
        text = encode(payload)
    except ValueError:
        text = encode(_with_finite_numbers(payload))
    return text.encode("utf-8", "backslashreplace")  # Python writes such a half as JSON does


def _check_type(request: Request) -> None:
    given = request.headers.getlist("content-type")
    kind, _, parameters = (given[0] if given else "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if len(given) != 1 or kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        shown = ", ".join(given)[:80] or "missing"
        raise UnsupportedMediaType(f"the content type is {shown}; send application/json in UTF-8")
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"the content encoding is {encoding[:80]}; send the body without one")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The bytes of a body of any kind, within the limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise BodyTooLarge(f"the body has {int(declared[:20]):,} bytes; at most {limit:,} are taken")
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > limit:
                raise BodyTooLarge(f"the body has more than {limit:,} bytes; send less")
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone("the connection ended before the body did") from None
    return b"".join(parts)


def _decode(data: bytes) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        raise BadBody("the body begins with a byte order mark; send plain UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not UTF-8: {error.reason} at byte {error.start:,}") from None


def _check_strings(data: bytes, max_values: int) -> None:
    """Refuse what certainly has too many strings, before anything is made of it: the count is never too high."""
    num_strings = (data.count(b'"') - data.count(b'\\"')) // 2
    if num_strings > max_values + MAX_MEMBERS:
        raise BadBody(
            f"the body has {num_strings:,} texts and names, at most {max_values:,} values and {MAX_MEMBERS:,} fields "
            "are read; send fewer"
        )


def _without_strings(data: bytes) -> bytes:
    """JSON without white space and what is between its quotation marks, of which the second of each pair stays.

    Of large ones by NumPy and in pieces, between which other threads run: a body may have a million strings.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    if len(plain) <= SMALL_BYTES:
        return b'"'.join(plain.split(b'"')[::2]).translate(None, b" \t\r\n")
    parts, num_before = [], 0
    for start in range(0, len(plain), PIECE_BYTES):
        characters = np.frombuffer(plain, np.uint8, min(PIECE_BYTES, len(plain) - start), start)
        # It wraps around: only whether it is odd counts.
        num_marks = np.cumsum(characters == ord('"'), dtype=np.uint8) + np.uint8(num_before)
        num_before = int(num_marks[-1]) & 1
        parts.append(bytes(characters[num_marks & 1 == 0]).translate(None, b" \t\r\n"))
    return b"".join(parts)


def _check_shape(bare: bytes, max_depth: int, max_values: int) -> None:
    """Check the counts, the nesting and the length of numbers in JSON without its strings, before it is parsed."""
    if bare.count(b",") >= max_values:
        raise BadBody(f"the body has {bare.count(b',') + 1:,} values, at most {max_values:,} are read; send fewer")
    if bare.count(b":") > MAX_MEMBERS:
        raise BadBody(f"the body has {bare.count(b':'):,} fields, at most {MAX_MEMBERS:,} are read; send fewer")
    if bare.count(b"[") + bare.count(b"{") > max_depth:  # else it cannot be deeper
        _check_depth(bare, max_depth)
    if _LONG_NUMBER.search(bare):
        raise BadBody("the body has a number of more than 4,300 digits")


def _check_depth(bare: bytes, max_depth: int) -> None:
    brackets = np.frombuffer(bare.translate(None, _NOT_A_BRACKET), dtype=np.uint8)
    if brackets.size > 2 * MAX_CONTAINERS:
        raise BadBody(f"the body has more than {MAX_CONTAINERS:,} lists and objects; send fewer")
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depth = int(np.where(opens, 1, -1).cumsum().max(initial=0))
    if depth > max_depth:
        raise BadBody(f"the body is nested {depth:,} levels deep; at most {max_depth} are taken")


def _check_text(value: object, *path: str) -> None:
    """Refuse characters that some reader of JSON does not take, by the name of the field."""
    if isinstance(value, str):
        _check_characters(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, *path, str(index))
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_characters(key, path)
            _check_text(item, *path, key)


def _check_characters(text: str, path: tuple[str, ...]) -> None:
    try:
        text.encode("utf-8")
        if "\x00" not in text:
            return
        what = "the character NUL (\\u0000); leave it out"
    except UnicodeEncodeError as error:
        what = f"half of a surrogate pair (\\u{ord(text[error.start]):04x}); send both"
    where = shortened(repr(".".join(path))[1:-1], 160, 40)
    raise BadBody(f"{where or 'a name in the body'} contains {what}", where or None)


def _encode_in_pieces(payload: Any) -> str:
    return "".join(_ENCODER.iterencode(payload))


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_finite_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(one) for one in value]
    return value
