"""How one family of models writes tool calls, as data: read by the scanner, the grammars and the tool prompt.

    begin  (head NAME after_name ARGUMENTS tail) join (...) end          json:  begin JSON end

Texts are as the model writes them; white space at their ends is what it usually writes, and any is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Body = Literal["json", "object", "pairs", "python", "gemma"]


@dataclass(frozen=True, slots=True)
class Word:
    """Letters, digits, dashes and underscores that mean nothing here: an id, a number."""

    example: str = "0"


@dataclass(frozen=True, slots=True)
class MaybeWord:
    """A marker with a word behind it; both may be missing."""

    marker: str


Piece = str | Word | MaybeWord


@dataclass(frozen=True, slots=True)
class PairForm:
    """One argument: open KEY key_close VALUE close. Values are texts, and what they mean is told by the schema."""

    open: str
    key_closes: tuple[tuple[str, bool | None], ...]  # each with whether the value is a string; None: not told
    close: str
    value_open: str = ""  # stands after key_close
    pad: str = ""  # stands on both sides of a value and is no part of it
    quotes: tuple[str, str] | None = None  # a value may stand between them: then it is a string


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls begin and end, and what stands between."""

    body: Body = "json"
    begin: str = ""  # may stand anywhere in the content; empty: there is none, or head is what calls begin with
    head: tuple[Piece, ...] = ()  # of JSON: the members before the name
    after_name: tuple[Piece, ...] = ()
    tail: tuple[str, ...] = ()
    join: str = ""  # between two calls of one begin
    end: tuple[str, ...] = ()
    between: str = ""  # between an end and the next begin
    holds_many: bool = False  # several calls may stand between begin and end
    pairs: PairForm | None = None
    is_bare: bool = False  # the answer may also begin with the JSON itself, and more may follow a call
    name_key: str = "name"  # of JSON, and what its grammar writes
    arguments_key: str = "arguments"
    takes_json: bool = False  # JSON may stand instead of a name

    @property
    def marker(self) -> str:
        """The text by which calls are found in content."""
        return (self.begin or "".join(piece for piece in self.head[:1] if isinstance(piece, str))).strip()

    def texts(self) -> Iterator[str]:
        """Every text that stands around names and arguments."""
        yield from (self.begin, *self.tail, *self.end)
        for piece in (*self.head, *self.after_name):
            if not isinstance(piece, Word):
                yield piece if isinstance(piece, str) else piece.marker
        if self.pairs is not None:
            yield from (self.pairs.open, self.pairs.value_open, self.pairs.close)
            yield from (text for text, _ in self.pairs.key_closes)
        if self.body == "gemma":
            yield GEMMA_QUOTE


GEMMA_QUOTE = '<|"|>'
