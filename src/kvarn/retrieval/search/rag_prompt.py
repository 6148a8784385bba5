"""Hits to a RAG prompt: the best whole chunks within a budget of tokens, in a stable order, numbered for citation.

Chunks come before the question, sorted by document and position: the same hits give the same prefix, whatever their
scores, and hit the prefix cache. A chunk that does not fit is left out whole and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvarn.checks import short
from kvarn.config import MAX_CONTEXT
from kvarn.errors import InvalidParameter
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.types import Hit, Mode, Tuning, check, check_k, check_mode
from kvarn.types import Citation, Grounded, Message

if TYPE_CHECKING:
    from kvarn.retrieval.collection import Collection

Count = Callable[[str], int]
DEFAULT_BUDGET = 1024  # tokens; at most half of the model's context
RULE = "Use only these sources to answer, and cite them like [1]. If they do not hold the answer, say so."
NO_SOURCES = "No source was found for this question; say so."


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

    def __post_init__(self) -> None:
        check_k("k", self.k)
        check_mode(self.mode)
        check.instance("tuning", self.tuning, Tuning, "a kvarn.Tuning")
        check.instance("query", self.query, str, "a string, or None", optional=True)
        parse_filter(self.filter)
        check.integer("max_context_tokens", self.budget, 1, MAX_CONTEXT, optional=True)

    def ground(self, messages: Sequence[Message], count: Count, context: int) -> Grounded:
        """Search for the last question and put the sources before it; returns messages and citations."""
        check.function("count", count)
        check.integer("context", context, 1, MAX_CONTEXT)
        query = self.query or last_question(messages)
        hits = self.collection.search(query, self.k, self.mode, self.filter, self.tuning)
        budget = self.budget or min(DEFAULT_BUDGET, context // 2)
        chosen, left_out = fit(hits, budget, count)
        citations = tuple(_citation(number, hit) for number, hit in enumerate(chosen, 1))
        return Grounded(with_sources(messages, chosen), citations, tuple(hit.id for hit in left_out))


def last_question(messages: Sequence[Message]) -> str:
    """The text of the user's last message."""
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidParameter(f"messages is {short(messages)}; give a list of messages", field="messages")
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list | tuple) else ()
            texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
            text = content if isinstance(content, str) else " ".join(texts)
            if text.strip():
                return text
    raise InvalidParameter("there is no message of the user to look up; add one, or give the query", field="messages")


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
    return sorted(chosen, key=lambda hit: (hit.document, hit.span)), left_out


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
    """One source as it is in the prompt."""
    title = " > ".join(filter(None, (hit.source or hit.document, hit.heading)))
    return f"[{number}] {title}\n{hit.text}"


def _citation(number: int, hit: Hit) -> Citation:
    return Citation(number, hit.id, hit.document, hit.source, hit.span, hit.score)
