"""Documents to chunks of a bounded number of tokens, split at the text's own boundaries.

A document is split into sections (Markdown headings, definitions in code), and these as tokenizer.text_units does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvarn.checks import check_parameter
from kvarn.retrieval.types import Document, Kind, TextChunk
from kvarn.tokenizer.text_units import Count, found_in, split_text, weighed

MAX_HEADING_CHARS = 200
_HEADING_OR_FENCE = re.compile(r"^(?:(#{1,6})[ \t]+([^\n]+)|(```|~~~))", re.MULTILINE)
_DEFINITION = re.compile(
    r"^(?:async def|def|class|fn|pub fn|impl|func|function|export|struct|enum|interface|type|template)"
    r"\b[^\n]*",
    re.MULTILINE,
)
_DECORATOR = re.compile(r"@\w")


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
    chunks = []
    for start, end, heading in _sections(text, document.kind):
        head = heading[:MAX_HEADING_CHARS]
        room = chunking.tokens - (count(head) if head else 0)
        parts = split_text(text, (start, end), room, chunking.overlap, count)
        chunks += [TextChunk(text[a:b], a, b, head) for a, b in parts]
    return chunks


def _sections(text: str, kind: Kind) -> Iterator[tuple[int, int, str]]:
    """Start, end and heading of a document's sections."""
    marks: Iterable[tuple[int, str]] = ()
    if kind in ("markdown", "html"):
        marks = _heading_paths(text)
    elif kind == "code":
        marks = [(start, "") for start in _definitions(text)]
    starts = [(0, ""), *marks]
    for (start, heading), (end, _) in zip(starts, [*starts[1:], (len(text), "")], strict=True):
        if text[start:end].strip():
            yield start, end, heading


def _definitions(text: str) -> Iterator[int]:
    """Where each definition begins, with the decorators above it."""
    floor = 0
    for match in found_in(_DEFINITION, text, (0, len(text))):
        start = match.start()
        while start > floor and _DECORATOR.match(text, above := text.rfind("\n", floor, start - 1) + 1 or floor):
            start = above
        yield start
        floor = match.end()


def _heading_paths(text: str) -> list[tuple[int, str]]:
    """Where each heading begins, with the path of those above it: "Install > From source"."""
    fence = ""  # of the code block that is open
    path: list[tuple[int, str]] = []
    marks = []
    for match in found_in(_HEADING_OR_FENCE, text, (0, len(text))):
        if mark := match.group(3):
            fence = "" if fence == mark else fence or mark
        if fence or mark:
            continue
        level = len(match.group(1))
        title = match.group(2)[: 2 * MAX_HEADING_CHARS]  # bounded: every heading below repeats it
        title = title.rstrip(" \t#") or title[0]
        path = [*(one for one in path if one[0] < level), (level, title[:MAX_HEADING_CHARS])]
        marks.append((match.start(), " > ".join(title for _, title in path)))
    return marks
