"""JSON responses: any payload becomes strict JSON, in UTF-8."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_response(content: bytes, headers: Mapping[str, str]) -> Response:
    """A response of JSON that is written already."""
    return Response(content, headers=headers, media_type="application/json")


def write_json(payload: Mapping[str, Any], *, in_pieces: bool = False) -> bytes:
    """JSON for any payload: half of a surrogate pair as its escape; null for a number that JSON does not have.

    in_pieces: for worker threads; the fast encoder would keep every other thread waiting until the last byte.
    """
    encode = _encode_in_pieces if in_pieces else _ENCODER.encode
    try:
        text = encode(payload)
    except ValueError:
        text = encode(_with_finite_numbers(payload))
    return text.encode("utf-8", "backslashreplace")  # Python writes such a half as JSON does


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
