"""Hits to a RAG prompt: the best whole chunks within a budget of tokens, in a stable order, numbered for citation.

Chunks come before the question, sorted by document and position: the same hits give the same prefix, whatever their
scores, and hit the prefix cache. A chunk that does not fit is left out whole and reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvarn.checks import short
from kvarn.citations.types import Citation, Grounded
from kvarn.config import MAX_CONTEXT
from kvarn.errors import InvalidParameter
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.search.small_talk import is_greeting, own_words, question_before
from kvarn.retrieval.types import MAX_QUERY_CHARS, Hit, Mode, Tuning, check, check_k, check_mode, check_text
from kvarn.structured.constraints import Regex
from kvarn.types import Message

if TYPE_CHECKING:
    from kvarn.retrieval.collection import Collection

Count = Callable[[str], int]
DEFAULT_BUDGET = 1024  # tokens; at most half of the model's context
RULE = "Use only these sources to answer, and cite them like [1]. If they do not hold the answer, say so."
NO_SOURCES = "No source was found for this question; say so."
REFUSAL = "This is not in your documents."
MIN_RELEVANCE = 0.4  # of the best hit; chosen on tuning sets, see docs/retrieval.md
MAX_REFUSAL_CHARS = 500
MAX_BLANKS = 32  # between chunks that are one source
LIKE_A_SOURCE = re.compile(r"(?:^|(?<=[\r\v\f\x1c-\x1e\x85\u2028\u2029]))(?=\[\d)", re.MULTILINE)
Cite = Literal["free", "every_sentence"]


@dataclass(frozen=True, slots=True)
class Grounding:
    """Options of retrieval for a chat; what `retrieve=` takes besides a collection itself."""

    collection: Collection
    k: int = 4
    mode: Mode = "hybrid"
    filter: Mapping[str, Any] | None = None
    budget: int | None = None  # tokens for all sources together; None: 1,024, at most half of the context
    query: str | None = None  # None: the last message of the user
    tuning: Tuning = field(default_factory=Tuning)
    min_relevance: float = MIN_RELEVANCE  # of the best hit, else the answer is the refusal; 0: never
    refusal: str = REFUSAL
    cite: Cite = "free"  # every_sentence: a grammar holds the answer to sentences that end with [1]

    def __post_init__(self) -> None:
        check_k("k", self.k)
        check_mode(self.mode)
        check.instance("tuning", self.tuning, Tuning, "a kvarn.Tuning")
        check.instance("query", self.query, str, "a string, or None", optional=True)
        parse_filter(self.filter)
        check.integer("max_context_tokens", self.budget, 1, MAX_CONTEXT, optional=True)
        check.number("min_relevance", self.min_relevance, 0.0, 1.0)
        check_text("refusal", self.refusal, MAX_REFUSAL_CHARS)
        check.one_of("cite", self.cite, get_args(Cite))
        if not self.refusal.strip():
            raise InvalidParameter("refusal is empty; give the sentence that says so", field="refusal")

    def ground(self, messages: Sequence[Message], count: Count, context: int) -> Grounded:
        """Search for the last question and put the sources before it; returns messages and citations."""
        check.function("count", count)
        check.integer("context", context, 1, MAX_CONTEXT)
        query, hits = self._found(messages)
        if not self._is_answered(hits):
            return self._without_sources(messages)
        chosen, left_out = fit(hits, self.budget or min(DEFAULT_BUDGET, context // 2), count)
        citations = tuple(_citation(number, hit) for number, hit in enumerate(chosen, 1))
        return Grounded(
            with_sources(messages, chosen),
            citations,
            tuple(hit.id for hit in left_out),
            every_sentence_cited(len(chosen)) if self.cite == "every_sentence" else None,
            self.collection.attributor(query, chosen),
        )

    def _found(self, messages: Sequence[Message]) -> tuple[str, list[Hit]]:
        """The hits for the last question; for one such as "and why?" those of the question before it, if they serve.

        One without a word of its own is never looked up alone: what has its words answers something else.
        """
        query = self.query or last_question(messages)
        hits, language = self._search(query), self.collection.language
        own, before = own_words(query, language), question_before(questions(messages), language)
        if self.query or before is None or is_greeting(query, language) or (own and self._is_answered(hits)):
            return query, hits
        if len(own) > 1:
            return query, hits
        together = f"{before} {query}"[-MAX_QUERY_CHARS:]
        found = self._search(together)
        is_known = all(word in hit.text.casefold() for word in own for hit in found[:1])
        return (together, found) if not own or (is_known and self._is_answered(found)) else (query, hits)

    def _search(self, query: str) -> list[Hit]:
        return self.collection.search(query, self.k, self.mode, self.filter, self.tuning)

    def _without_sources(self, messages: Sequence[Message]) -> Grounded:
        """The refusal; small talk, which asks nothing of the documents, stays as it is."""
        if not self.query:
            language, asked = self.collection.language, questions(messages)
            is_first = question_before(asked, language) is None
            if is_greeting(asked[-1], language) or (is_first and not own_words(asked[-1], language)):
                return Grounded(messages, ())
        constraint = exactly(self.refusal) if self.min_relevance else None
        return Grounded(with_sources(messages, ()), (), constraint=constraint)

    def _is_answered(self, hits: Sequence[Hit]) -> bool:
        """Whether one of the hits is likely to answer; those without a relevance are believed."""
        return any(hit.relevance is None or hit.relevance >= self.min_relevance for hit in hits)


def last_question(messages: Sequence[Message]) -> str:
    """The text of the user's last message."""
    if asked := questions(messages):
        return asked[-1]
    raise InvalidParameter("there is no message of the user to look up; add one, or give the query", field="messages")


def questions(messages: Sequence[Message]) -> list[str]:
    """The texts of the user's messages, in order; those without text are left out."""
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidParameter(f"messages is {short(messages)}; give a list of messages", field="messages")
    texts = (_text(message.get("content")) for message in messages if message.get("role") == "user")
    return [text for text in texts if text.strip()]


def _text(content: object) -> str:
    parts = content if isinstance(content, list | tuple) else ()
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
    return content if isinstance(content, str) else " ".join(texts)


def fit(hits: Sequence[Hit], budget: int, count: Count) -> tuple[list[Hit], list[Hit]]:
    """The best whole chunks that fit into the budget, in a stable order; and those that do not."""
    chosen: list[Hit] = []
    left_out: list[Hit] = []
    room = budget
    for hit in hits:
        needed = count(source_text(len(hits), hit))
        if needed <= room:
            chosen.append(hit)
            room -= needed
        else:
            left_out.append(hit)
    if hits and not chosen:
        needed = count(source_text(1, hits[0]))
        raise InvalidParameter(
            f"the best source has {needed:,} tokens and the budget for sources is {budget:,}; raise it, "
            "or index with smaller chunks",
            field="max_context_tokens",
        )
    return joined(sorted(chosen, key=lambda hit: (hit.document, hit.span))), left_out


def joined(hits: Sequence[Hit]) -> list[Hit]:
    """Chunks that overlap or are neighbours as one source; in the order of their documents and spans."""
    sources: list[Hit] = []
    last_chunk: Hit | None = None  # of the last source
    for hit in hits:
        if last_chunk is not None and (_overlap(sources[-1], hit) or _are_neighbours(last_chunk, hit)):
            sources[-1] = _union(sources[-1], hit)
        else:
            sources.append(hit)
        if sources[-1].span[1] == hit.span[1]:
            last_chunk = hit
    return sources


def _overlap(first: Hit, second: Hit) -> bool:
    return first.document == second.document and first.span[0] <= second.span[0] < first.span[1]


def _are_neighbours(first: Hit, second: Hit) -> bool:
    """Whether there is nothing between two chunks but a few blanks."""
    if first.document != second.document or first.ordinal is None or second.ordinal is None:
        return False
    return second.ordinal == first.ordinal + 1 and second.span[0] - first.span[1] <= MAX_BLANKS


def _union(first: Hit, second: Hit) -> Hit:
    """One hit of both texts, under the id and the scores of the better one; its text is as long as its span."""
    start, end = first.span[0], max(first.span[1], second.span[1])
    lines = (first.lines[0], max(first.lines[1], second.lines[1])) if first.lines and second.lines else None
    return replace(
        max(first, second, key=lambda hit: hit.score),
        text=first.text + _blanks(first, second) + second.text[max(first.span[1] - second.span[0], 0) :],
        span=(start, end),
        relevance=max((one.relevance for one in (first, second) if one.relevance is not None), default=None),
        highlights=(),
        heading=first.heading,
        lines=lines,
        page=first.page,
    )


def _blanks(first: Hit, second: Hit) -> str:
    """What is between neighbours, as far as their places tell: blanks, as many as there are."""
    count = max(second.span[0] - first.span[1], 0)
    num_breaks = second.lines[0] - first.lines[1] if first.lines and second.lines else count - (count == 1)
    return "\n" * min(num_breaks, count) + " " * (count - num_breaks)


def with_sources(messages: Sequence[Message], hits: Sequence[Hit]) -> list[Message]:
    """The messages with the sources before the last question: small models overlook them anywhere else."""
    sources = "\n\n".join(source_text(number, hit) for number, hit in enumerate(hits, 1))
    prefix = f"Sources:\n\n{sources}\n\n{RULE}\n\n" if hits else f"{NO_SOURCES}\n\n"
    position = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if position is None:
        return [*messages, {"role": "user", "content": prefix.strip()}]
    content = messages[position].get("content")
    extended = prefix + content if isinstance(content, str) else [{"type": "text", "text": prefix}, *(content or ())]
    return [*messages[:position], {**messages[position], "content": extended}, *messages[position + 1 :]]


def source_text(number: int, hit: Hit) -> str:
    """One source as it is in the prompt: no line of its text, and none of its title, begins as another source does."""
    title = " ".join(" > ".join(filter(None, (hit.source or hit.document, hit.heading))).split())
    return f"[{number}] {title}\n{LIKE_A_SOURCE.sub(' ', hit.text)}"


def exactly(text: str) -> Regex:
    """An answer of these words and no others."""
    return Regex(re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", text))


def every_sentence_cited(num_sources: int) -> Regex:
    """An answer of sentences that each end with the number of a source that there is."""
    numbers = "|".join(map(str, range(1, num_sources + 1)))
    sentence = rf"[^\s\[\]][^\[\]\n]{{0,400}} \[(?:{numbers})\](?: \[(?:{numbers})\])?\.?"
    return Regex(rf"{sentence}(?:[ \n]{sentence}){{0,15}}")


def _citation(number: int, hit: Hit) -> Citation:
    return Citation(
        number,
        hit.id,
        hit.document,
        hit.source,
        hit.span,
        hit.score,
        hit.relevance,
        lines=hit.lines,
        page=hit.page,
        text=hit.text,
    )
