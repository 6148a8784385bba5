"""Where a folder has its chat template: in a file of its own, or in tokenizer_config.json. Renders nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvarn.formats.strict_json import MAX_JSON_BYTES, read_bytes


def chat_template_of(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template of a folder with that tokenizer_config.json."""
    separate = path / "chat_template.jinja"
    if os.path.lexists(separate):
        return read_bytes(separate, MAX_JSON_BYTES).decode("utf-8", "replace")
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else None
