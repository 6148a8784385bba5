"""What an answer owes to documents, as lines below it in a terminal, and read from what a server tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvarn.citations.types import Citation, CitedPassage, SentenceSupport, pages_told
from kvarn.types import Completion


def source_lines(completion: Completion) -> Iterator[str]:
    """A line for each source, with whether it is cited, and one for each sentence that none of them supports."""
    is_known = bool(completion.sentences)
    for one in completion.citations:
        yield f"[{one.number}] {_place(one)}{', cited' if one.is_cited else ', not cited' if is_known else ''}"
    for sentence in completion.sentences:
        if not sentence.is_supported:
            yield f"not in the sources: {' '.join(completion.text[slice(*sentence.span)].split())}"


def read_citations(retrieval: Mapping[str, Any]) -> tuple[Citation, ...]:
    """The sources of a server's answer; what is not understood is left out."""
    return tuple(_read(retrieval, "citations", _citation))


def read_sentences(retrieval: Mapping[str, Any]) -> tuple[SentenceSupport, ...]:
    """The sentences of a server's answer, and what supports them; what is not understood is left out."""
    return tuple(_read(retrieval, "sentences", _sentence))


def _place(citation: Citation) -> str:
    source = citation.source or citation.document
    if citation.lines is not None:
        return f"{source}:{citation.lines[0]}-{citation.lines[1]}"
    return source if citation.page is None else f"{source}, {pages_told(citation.page, citation.text)}"


def _read(retrieval: Mapping[str, Any], name: str, read: Any) -> Iterator[Any]:
    given = retrieval.get(name)
    for one in given if isinstance(given, list) else ():
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            yield read(one)


def _citation(given: Mapping[str, Any]) -> Citation:
    lines, page = given.get("lines"), given.get("page")
    return Citation(
        number=int(given["number"]),
        id=str(given.get("id", "")),
        document=str(given.get("document", "")),
        source=str(given.get("source", "")),
        span=_span(given["span"]) if "span" in given else (0, 0),
        score=float(given.get("score", 0.0)),
        relevance=given.get("relevance"),
        is_cited=given.get("cited") is True,
        lines=None if lines is None else (int(lines["first"]), int(lines["last"])),
        page=None if page is None else int(page),
    )


def _sentence(given: Mapping[str, Any]) -> SentenceSupport:
    passages = (CitedPassage(int(one["number"]), _span(one["span"]), float(one["score"])) for one in given["passages"])
    return SentenceSupport(_span(given["span"]), float(given["score"]), tuple(passages))


def _span(given: Mapping[str, Any]) -> tuple[int, int]:
    return int(given["start"]), int(given["end"])
