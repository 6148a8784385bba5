"""Options of a diffusion model on the command line: NAME=VALUE, by the names of kvarn.DiffusionParams."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvarn.diffusion import DiffusionParams, SparseConfig
from kvarn.errors import InvalidParameter

NAMES = tuple(field.name for field in fields(DiffusionParams) if field.name != "events")
SPARSE_NAMES = tuple(field.name for field in fields(SparseConfig))


def diffusion_params(options: Sequence[str], *, wants_events: bool = False) -> DiffusionParams | None:
    """Parameters from NAME=VALUE options; None: none was given."""
    given: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in NAMES or not equals:
            raise InvalidParameter(
                f"--diffusion is {option!r:.60}; give NAME=VALUE, NAME one of {', '.join(NAMES)}", field="diffusion"
            )
        given[name] = _OBJECTS[name](value) if name in _OBJECTS else _value(value)
    return DiffusionParams(**given, events=wants_events) if given or wants_events else None


def _pinned(text: str) -> dict[int, Any]:
    """Index in the answer to a token id, or to a text."""
    given = _object("pinned", text, '{"40": "They were happy."}')
    if not all(index.isascii() and index.isdigit() for index in given):
        raise InvalidParameter("--diffusion pinned has an index that is no whole number", field="diffusion")
    return {int(index[:10]): pinned for index, pinned in given.items()}


def _sparse(text: str) -> SparseConfig:
    given = _object("sparse", text, '{"retention_ratio": 0.3}')
    if unknown := sorted(given.keys() - set(SPARSE_NAMES)):
        raise InvalidParameter(
            f"--diffusion sparse has no field {unknown[0]!r:.60}; it has {', '.join(SPARSE_NAMES)}", field="diffusion"
        )
    return SparseConfig(**given)


def _object(name: str, text: str, example: str) -> dict[str, Any]:
    given = _value(text)
    if not isinstance(given, dict):
        raise InvalidParameter(
            f"--diffusion {name} is {text!r:.60}; give a JSON object such as {example}", field="diffusion"
        )
    return given


_OBJECTS: Mapping[str, Callable[[str], Any]] = {"pinned": _pinned, "sparse": _sparse}


def _value(text: str) -> Any:
    """A number where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
