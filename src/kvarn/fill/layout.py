"""Where the parts of a template lie on a canvas, and what was filled in read back. Knows tokens, never an engine.

    literal    slot          literal   slot
    | pinned | masked ...  | pinned | masked ... |

A space before a slot belongs to its first word, as tokens have it: it is no part of the literal on the canvas, and is
written once in the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.fill.template import NamedSlot, Parts, Slot
from kvarn.structured.constraints import CanvasSlot, Constraint

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvarn.structured.compiler import CompiledConstraint
    from kvarn.tokenizer.tokenizer import Tokenizer
    from kvarn.types import Completion

DEFAULT_SLOT_TOKENS = 16
MAX_NEEDED = 1024  # tokens of the shortest text of a slot
MAX_BEFORE = 3  # tokens of BEFORE
BEFORE = "\n"  # literals are cut into tokens after it: some tokenizers put a space before a text


@dataclass(frozen=True, slots=True)
class Filled:
    """A filled template."""

    text: str
    values: Mapping[str, str]  # by slot
    completion: Completion  # the canvas as it came from the model


@dataclass(frozen=True, slots=True)
class _Place:
    """A slot on the canvas."""

    named: NamedSlot
    start: int
    length: int
    after_space: bool


@dataclass(frozen=True, slots=True)
class CanvasLayout:
    """A template on a canvas."""

    parts: Parts
    num_tokens: int
    pinned: Mapping[int, int]  # token ids of the literals, by index in the answer
    slots: tuple[CanvasSlot, ...]  # those with a constraint
    places: Mapping[str, _Place]
    null_id: int

    def filled(self, tokenizer: Tokenizer, completion: Completion) -> Filled:
        """The filled text, and what stands in each slot."""
        ids = completion.token_ids
        values = {name: self._value(tokenizer, place, ids) for name, place in self.places.items()}
        text = "".join(part if isinstance(part, str) else values[part.name] for part in self.parts)
        return Filled(text, values, completion)

    def _value(self, tokenizer: Tokenizer, place: _Place, token_ids: Sequence[int]) -> str:
        ids = list(token_ids[place.start : place.start + place.length])
        ids = ids[: ids.index(self.null_id)] if self.null_id in ids else ids
        text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        if place.named.slot.constraint(after_space=False) is None:
            return text.strip()
        return text.removeprefix(" ") if place.after_space else text


def lay_out(
    tokenizer: Tokenizer, parts: Parts, compile: Callable[[Constraint], CompiledConstraint], room: int
) -> CanvasLayout:
    """Place a template on a canvas of at most `room` tokens; compile: makes a constraint ready for the model."""
    if not tokenizer.eos_ids:
        raise UnsupportedModel("the model has no token that ends a text, so slots could not be shorter than their room")
    null_id = tokenizer.eos_ids[0]
    pinned: dict[int, int] = {}
    places: dict[str, _Place] = {}
    slots: list[CanvasSlot] = []
    at = 0
    for index, part in enumerate(parts):
        if isinstance(part, str):
            is_before_slot = index + 1 < len(parts)
            for token_id in literal_ids(tokenizer, part.removesuffix(" ") if is_before_slot else part):
                pinned[at] = token_id
                at += 1
            _check_room(at, room)
            continue
        before = parts[index - 1] if index else ""
        after_space = isinstance(before, str) and before.endswith(" ")
        constraint = part.slot.constraint(after_space=after_space)
        compiled = None if constraint is None else compile(constraint)
        way = () if compiled is None else _way(part, compiled)
        length = part.slot.max_tokens or max(len(way), _usual_length(tokenizer, part.slot))
        places[part.name] = _Place(part, at, length, after_space)
        if compiled is not None:
            following = parts[index + 1] if index + 1 < len(parts) else ""
            end_ids = literal_ids(tokenizer, following)[:1] if isinstance(following, str) else []
            slots.append(CanvasSlot(at, length, compiled, null_id, way, frozenset({*tokenizer.eos_ids, *end_ids})))
        at += length
        _check_room(at, room)
    return CanvasLayout(parts, at, pinned, tuple(slots), places, null_id)


def _check_room(num_tokens: int, room: int) -> None:
    if num_tokens > room:
        raise InvalidParameter(
            f"the template takes more than {room:,} tokens, which the context leaves; shorten it, or give slots "
            "less room with max_tokens",
            field="template",
        )


def literal_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that does not stand at the beginning of one."""
    if not text:
        return []
    ids = tokenizer.encode(BEFORE + text, add_special=False)
    for start in range(min(len(ids), MAX_BEFORE) + 1):  # a tokenizer that changes the text has none: do not try all
        if b"".join(map(tokenizer.token_bytes, ids[start:])) == text.encode():
            return ids[start:]
    return tokenizer.encode(text, add_special=False)


def _way(part: NamedSlot, compiled: CompiledConstraint) -> tuple[int, ...]:
    """Tokens that the slot may consist of, as few as are found."""
    most = part.slot.max_tokens or MAX_NEEDED
    way = compiled.slot_matcher().completion(most)
    if way is None:
        raise InvalidParameter(
            f"no text of {most:,} tokens or fewer was found for slot {part.name!r}; give it more room with max_tokens, "
            "or allow shorter texts",
            field="slots",
        )
    return way


def _usual_length(tokenizer: Tokenizer, slot: Slot) -> int:
    """Room for choices and enums as they are, and for other values the usual."""
    options: Sequence[Any] = slot.choices
    if slot.schema is not None and isinstance(slot.schema.get("enum"), list):
        options = [_as_json(one) for one in slot.schema["enum"]]
    elif slot.schema is not None and slot.schema.get("type") in ("boolean", "null"):
        options = ["true", "false", "null"]
    if not options:
        return DEFAULT_SLOT_TOKENS
    return max(len(literal_ids(tokenizer, " " + option)) for option in options) + 1


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
