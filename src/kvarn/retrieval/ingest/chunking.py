"""Documents to chunks of a bounded number of tokens, split at the text's own boundaries.

A document is split into sections (sections.py), and these as tokenizer.text_units does.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.checks import check_parameter
from kvarn.retrieval.ingest.sections import MAX_HEADING_CHARS, sections
from kvarn.retrieval.types import Document, Kind, Lines, TextChunk
from kvarn.tokenizer.text_units import Count, split_text, weighed

TEXT_KINDS: frozenset[Kind] = frozenset({"text", "markdown", "rst", "csv", "code"})  # the text is that of the file


@dataclass(frozen=True, slots=True)
class Chunking:
    """The length and overlap of chunks, in tokens of the embedding model."""

    tokens: int = 200
    overlap: int = 32

    def __post_init__(self) -> None:
        check_parameter.integer("chunk_tokens", self.tokens, 8, 2**20)
        check_parameter.integer("overlap", self.overlap, 0, self.tokens // 2)


def split(document: Document, chunking: Chunking, count: Count) -> list[TextChunk]:
    """The chunks of a document, in order; blank ones are left out."""
    text, count = document.text, weighed(count)
    places = _Places(document)
    chunks = []
    for start, end, heading in sections(text, document.kind):
        head = heading[:MAX_HEADING_CHARS]
        room = chunking.tokens - (count(head) if head else 0)
        parts = split_text(text, (start, end), room, chunking.overlap, count)
        chunks += [TextChunk(text[a:b], a, b, head, places.lines(a, b), places.page(a)) for a, b in parts]
    return chunks


class _Places:
    """Lines and pages of a document's chunks, asked for in order: each character is looked at once."""

    def __init__(self, document: Document) -> None:
        self._text = document.text
        self._has_lines = document.kind in TEXT_KINDS
        self._has_pages = document.kind == "pdf"
        self._at, self._line, self._page = 0, 1, 1

    def lines(self, start: int, end: int) -> Lines | None:
        """The lines of a span that neither begins nor ends with a blank."""
        if not self._has_lines:
            return None
        self._advance(start)
        return self._line, self._line + self._text.count("\n", start, end)

    def page(self, start: int) -> int | None:
        """The page of a PDF's text, in which form feeds part the pages."""
        if not self._has_pages:
            return None
        self._advance(start)
        return self._page

    def _advance(self, start: int) -> None:
        first, last, sign = (self._at, start, 1) if start >= self._at else (start, self._at, -1)  # chunks may overlap
        self._line += sign * self._text.count("\n", first, last)
        self._page += sign * self._text.count("\f", first, last)
        self._at = start
