"""Constraints on an answer: a JSON schema, a regular expression or a grammar. Frozen; checked for form when made.

Knows no tokens: structured/compiler.py turns one of these into masks for a vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from kvarn.checks import short
from kvarn.errors import ConstraintError
from kvarn.structured.schema_recursion import check_recursion
from kvarn.structured.schema_width import check_width

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CONSTRAINT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that follows a schema, given as a dict or as JSON text; None: any JSON object. Kept as JSON text."""

    schema: Mapping[str, Any] | str | bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", _schema_text(self.schema))

    @property
    def text(self) -> str:
        """The schema as JSON."""
        assert isinstance(self.schema, str)
        return self.schema


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole."""

    pattern: str

    def __post_init__(self) -> None:
        _check_text("the pattern", self.pattern)

    @property
    def text(self) -> str:
        return self.pattern


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar in llguidance's dialect of Lark; its first rule is called start."""

    lark: str

    def __post_init__(self) -> None:
        _check_text("the grammar", self.lark)

    @property
    def text(self) -> str:
        return self.lark


Constraint = JsonSchema | Regex | Grammar


class Matcher(Protocol):
    """The position of one answer in its constraint."""

    error: ConstraintError | None  # why nothing may follow

    def mask_after(self, token_ids: Sequence[int], num_prompt: int) -> npt.NDArray[np.uint32] | None:
        """One bit per token that may follow a prompt of num_prompt tokens and an answer; no bit: see error.

        None: any token may.
        """

    def accept_token(self, token_id: int) -> bool:
        """Take a sampled token; whether the answer is complete and nothing more may follow."""

    def fork(self) -> Matcher:
        """A matcher of its own at the same token, which may read the drafts that num_valid() counted."""

    def num_valid(self, token_ids: Sequence[int], num_prompt: int, drafts: Sequence[int]) -> int:
        """How many of the drafts may follow token_ids, one after the other."""

    def forced(self, token_ids: Sequence[int], num_prompt: int) -> list[int]:
        """The tokens after token_ids that have no alternative."""


class Compiled(Protocol):
    """A constraint ready for one vocabulary."""

    def matcher(self) -> Matcher:
        """A matcher at the start of an answer."""


@dataclass(frozen=True, slots=True)
class CanvasSlot:
    """Positions of an answer on a canvas that follow a constraint, from left to right; the rest of them are null."""

    start: int  # index in the answer
    length: int
    compiled: Any  # structured.compiler.CompiledConstraint
    null_id: int  # fills the positions after its end
    way: tuple[int, ...]  # tokens after which it may end, no more than its length
    end_ids: frozenset[int] = frozenset()  # chosen where it may end, they end it

    @property
    def end(self) -> int:
        return self.start + self.length


def _schema_text(schema: object) -> str:
    if schema is None:
        return '{"type":"object"}'
    if isinstance(schema, str):
        _check_text("the schema", schema)
        schema = _parsed(schema)
    if schema is True:
        schema = {}  # as JSON Schema has it: any value
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"the schema is {short(schema)}; give a JSON object, or one as text")
    try:
        # The order of properties stays: it is the order in which they are written.
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema cannot be written as JSON: {error or 'nested too deeply'}") from error
    _check_text("the schema", text)
    check_width(schema)
    if '"$ref"' in text:
        check_recursion(schema)
    return text


def _parsed(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except RecursionError:
        raise ConstraintError("the schema is nested too deeply; make it flatter") from None
    except ValueError as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value is a {type(value).__name__}")


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise ConstraintError(f"{what} is {short(text)}; give a string")
    try:
        num_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{what} has a lone surrogate at character {error.start}; give valid Unicode") from error
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise ConstraintError(f"{what} has {num_bytes:,} bytes; at most {MAX_CONSTRAINT_BYTES:,} are allowed")
