"""A template: literal text and named slots, written as {{name}}. Knows no tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.checks import check_parameter, short
from kvarn.errors import InvalidParameter
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema, Regex

MAX_SLOTS = 256
MAX_SLOT_TOKENS = 4096
MAX_TEMPLATE_CHARACTERS = 1 << 20
SLOT_NAME = r"[^\W\d][\w.-]{0,63}"
_SLOT = re.compile(rf"\{{\{{\s*({SLOT_NAME})\s*\}}\}}")


@dataclass(frozen=True, slots=True)
class Slot:
    """What may stand in one place of a template: any text, or what one of regex, choices and schema allows.

    max_tokens is the room it gets; None: 16, or what choices and a schema need. A shorter text is trimmed.
    """

    max_tokens: int | None = None
    regex: str | None = None  # the whole text of the slot
    choices: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None  # JSON that follows a schema

    def __post_init__(self) -> None:
        check_parameter.integer("max_tokens", self.max_tokens, 1, MAX_SLOT_TOKENS, optional=True)
        if isinstance(self.choices, str) or not isinstance(self.choices, Sequence):
            raise InvalidParameter(f"choices is {short(self.choices)}; give a list of texts", field="choices")
        if not all(isinstance(one, str) and one for one in self.choices):
            raise InvalidParameter("choices has something that is no text, or an empty one", field="choices")
        object.__setattr__(self, "choices", tuple(self.choices))
        given = [name for name in ("regex", "choices", "schema") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise InvalidParameter(f"{given[0]} and {given[1]} are both given; give one of them", field=given[1])

    def constraint(self, *, after_space: bool) -> Constraint | None:
        """What its text must follow; after_space: one that begins with a space. None: any text."""
        space = " " if after_space else ""
        if self.regex is not None:
            return Regex(f"{space}(?:{self.regex})")
        if self.choices:
            return Grammar("start: " + " | ".join(json.dumps(space + one) for one in self.choices))
        return None if self.schema is None else JsonSchema(self.schema)


@dataclass(frozen=True, slots=True)
class NamedSlot:
    """A slot in its place."""

    name: str
    slot: Slot


Parts = tuple[str | NamedSlot, ...]  # texts, none of them empty, and slots


def parse_template(text: str, slots: Mapping[str, Slot] | None = None) -> Parts:
    """The parts of a template; slots that are not described take any text."""
    check_parameter.instance("template", text, str, "a string")
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidParameter(
            f"the template has {len(text):,} characters; at most {MAX_TEMPLATE_CHARACTERS:,} are read", field="template"
        )
    described = dict(slots or {})
    pieces = _SLOT.split(text)
    names = pieces[1::2]
    _check_names(names, described)
    parts: list[str | NamedSlot] = []
    for index, piece in enumerate(pieces):
        if index % 2:
            parts.append(NamedSlot(piece, described.get(piece, Slot())))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _check_names(names: Sequence[str], described: Mapping[str, Slot]) -> None:
    if not names:
        raise InvalidParameter("the template has no slot; write one as {{name}}", field="template")
    if len(names) > MAX_SLOTS:
        raise InvalidParameter(
            f"the template has {len(names):,} slots; at most {MAX_SLOTS} are filled", field="template"
        )
    if repeated := {name for name in names if names.count(name) > 1}:
        raise InvalidParameter(f"the template has the slot {min(repeated)!r} twice; name each once", field="template")
    for name, slot in described.items():
        if name not in names:
            raise InvalidParameter(f"slots describes {short(name)}, which the template does not have", field="slots")
        check_parameter.instance(f"slot {name}", slot, Slot, "a kvarn.Slot")
