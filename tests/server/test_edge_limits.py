"""docs/server-limits.md says what the defaults are."""

from __future__ import annotations

import re
from pathlib import Path

from kvarn.server.process.settings import ServerConfig

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "server-limits.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\w.]+) \|", re.MULTILINE)
LIMITS = ("header_", "body_", "keep_alive", "write_", "request_timeout", "max_", "queue_", "allowed_", "cors_")


def test_the_document_tells_every_limit_with_its_default() -> None:
    told = dict(ROW.findall(DOCUMENT.read_text(encoding="utf-8")))
    config = ServerConfig()
    limits = {name for name in config.__slots__ if name.startswith(LIMITS)} - {"max_n"}
    assert set(told) == limits
    assert told == {name: str(getattr(config, name) or "none") for name in limits}
