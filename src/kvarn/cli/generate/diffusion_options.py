"""Options of a diffusion model on the command line: NAME=VALUE, by the names of kvarn.DiffusionParams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvarn.diffusion import DiffusionParams
from kvarn.errors import InvalidParameter

NAMES = tuple(field.name for field in fields(DiffusionParams) if field.name not in ("sparse", "pinned", "events"))


def diffusion_params(options: Sequence[str], *, wants_events: bool = False) -> DiffusionParams | None:
    """Parameters from NAME=VALUE options; None: none was given."""
    given: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in NAMES or not equals:
            raise InvalidParameter(
                f"--diffusion is {option!r:.60}; give NAME=VALUE, NAME one of {', '.join(NAMES)}", field="diffusion"
            )
        given[name] = _value(value)
    return DiffusionParams(**given, events=wants_events) if given or wants_events else None


def _value(text: str) -> Any:
    """A number where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
