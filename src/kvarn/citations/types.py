"""Sources of a chat and which sentences of its answer they support. Frozen; knows no collection and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvarn.structured.constraints import Constraint


@dataclass(frozen=True, slots=True)
class Citation:
    """A source that was in the prompt: a chunk, and where its document has it."""

    number: int  # as in "[1]"
    id: str
    document: str
    source: str
    span: tuple[int, int]  # characters of the document's text
    score: float
    relevance: float | None = None  # how likely it answers the question, 0 to 1; None: not a hybrid search
    is_cited: bool = False  # it supports a sentence of the answer, whatever the answer says of its number
    lines: tuple[int, int] | None = None  # the first and the last one in the file, where it is text
    page: int | None = None  # of a PDF
    text: str = ""  # as the model read it


@dataclass(frozen=True, slots=True)
class CitedPassage:
    """The part of a source that supports a sentence."""

    number: int  # of the citation
    span: tuple[int, int]  # characters of the document's text
    score: float  # how likely it supports the sentence, 0 to 1


@dataclass(frozen=True, slots=True)
class SentenceSupport:
    """A sentence of an answer, and what supports it; without a passage it is unsupported."""

    span: tuple[int, int]  # characters of the answer
    score: float  # of the best passage of all sources, also where that is too low
    passages: tuple[CitedPassage, ...] = ()  # the best one of each source that supports it, best first

    @property
    def is_supported(self) -> bool:
        return bool(self.passages)


def pages_told(page: int, text: str) -> str:
    """The pages of a PDF that a text is on, from the one where it begins: form feeds part them."""
    last = page + text.count("\f")
    return f"page {page}" if last == page else f"pages {page}-{last}"


class Attributor(Protocol):
    """What compares an answer with the sources that were in its prompt."""

    def attribute(self, answer: str) -> tuple[SentenceSupport, ...]:
        """Every sentence of an answer that says something, in order."""


@dataclass(frozen=True, slots=True)
class Grounded:
    """A conversation with sources in it."""

    messages: Sequence[Mapping[str, Any]]
    citations: tuple[Citation, ...]
    left_out: tuple[str, ...] = ()  # ids of chunks that were found and did not fit
    constraint: Constraint | None = None  # what the answer must be: a refusal, or sentences with citations
    attributor: Attributor | None = None

    @property
    def is_refused(self) -> bool:
        """Whether nothing relevant was found, and the answer says so."""
        return self.constraint is not None and not self.citations

    def attributed(self, answer: str) -> tuple[SentenceSupport, ...]:
        """Which sources support which sentences of an answer."""
        return () if self.attributor is None or not self.citations else self.attributor.attribute(answer)

    def cited(self, sentences: Sequence[SentenceSupport]) -> tuple[Citation, ...]:
        """The sources, marked by whether they support one of the sentences."""
        numbers = {passage.number for sentence in sentences for passage in sentence.passages}
        return tuple(replace(one, is_cited=one.number in numbers) for one in self.citations)


class Retrieves(Protocol):
    """What `chat(retrieve=...)` takes: something that puts sources into a conversation."""

    def ground(self, messages: Sequence[Mapping[str, Any]], count: Callable[[str], int], context: int) -> Grounded:
        """Search for what the conversation asks; count gives the tokens of a text, context those of the model."""
