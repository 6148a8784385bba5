"""Keys in a file, and what a ring says to a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.errors import AuthError
from kvarn.server.access.keyfile import draw_key, editing
from kvarn.server.access.keys import KeyRing


def add(file: Path, name: str, **given: object) -> str:
    key, entry = draw_key(name, **{"tier": "pro", **given})  # type: ignore[arg-type]
    with editing(file) as entries:
        entries.append(entry)
    return key


def bearer(key: str) -> list[bytes]:
    return [b"Bearer " + key.encode()]


def refusal(ring: KeyRing, authorization: list[bytes] | None = None, api_key: list[bytes] | None = None) -> AuthError:
    with pytest.raises(AuthError) as caught:
        ring.authenticate(authorization or [], api_key or [])
    return caught.value
