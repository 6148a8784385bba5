"""`kvarn config explain` and `kvarn serve --explain`: every setting of the server, its value and its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvarn.cli.terminal.options import Config

MAX_VALUE_WIDTH = 48


def explain_config(config: Config = None) -> None:
    """Print every setting of `kvarn serve`, its value and where it comes from.

    Sources, the strongest last: default, the TOML file, KVARN_SERVER_* variables. `kvarn serve --explain` has
    the flags too.
    """
    print_settings(config, {})


def print_settings(config: Path | None, flags: Mapping[str, Any]) -> None:
    """One line for each setting: name, value, source."""
    from kvarn.server.access.shared.store import shown_url
    from kvarn.server.process.setting_sources import explain

    def shown(value: object) -> str:
        return _toml_text(shown_url(value) if isinstance(value, str) and "://" in value else value)

    rows = [(setting.name, shown(setting.value), setting.source) for setting in explain(config, flags)]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), MAX_VALUE_WIDTH)
    for name, value, source in rows:
        print(f"{name:<{name_width}}  {value:<{value_width}}  {source}")


def _toml_text(value: object) -> str:
    """A value as TOML writes it; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_text(item) for item in value) + "]"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
