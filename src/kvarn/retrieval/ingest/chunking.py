"""Documents to chunks of a bounded number of tokens, split at the text's own boundaries.

A document is split into sections (Markdown headings, definitions in code), sections into units (paragraphs, then
lines, sentences, words), and units are packed until a chunk is full. Every chunk is an exact slice of the document;
the last units of one chunk are repeated at the start of the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvarn.checks import check_parameter
from kvarn.retrieval.types import Document, Kind, TextChunk

Count = Callable[[str], int]
Span = tuple[int, int]
MAX_HEADING_CHARS = 200
CHARS_PER_TOKEN = 16  # a text counts at least one token for so many: of a word of megabytes some models make one token
_BOUNDARIES = (  # from coarse to fine: where a unit that is too long is split
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"\n"),
    re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])"),
    re.compile(r"\s+"),
)
# The texts are untrusted, and matching holds the GIL: no expression may backtrack over a long text, or search all of
# one at a time.
WINDOW = 65_536  # characters searched at a time ...
WINDOW_OVERLAP = 64  # ... and again with the next ones, for what lies across
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
    text, count = document.text, _weighed(count)
    chunks = []
    for start, end, heading in _sections(text, document.kind):
        head = heading[:MAX_HEADING_CHARS]
        room = chunking.tokens - (count(head) if head else 0)
        units = list(_units(text, (start, end), max(room, 8), count))
        chunks += [TextChunk(text[a:b], a, b, head) for a, b in _packed(text, units, max(room, 8), chunking.overlap)]
    return chunks


def _weighed(count: Count) -> Count:
    """Tokens of a text, and for long words their share: it bounds the characters of a chunk too."""
    return lambda text: max(count(text), -(-len(text) // CHARS_PER_TOKEN))


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
    for match in _found(_DEFINITION, text, (0, len(text))):
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
    for match in _found(_HEADING_OR_FENCE, text, (0, len(text))):
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


def _units(text: str, span: Span, room: int, count: Count, level: int = 0) -> Iterator[tuple[Span, int]]:
    """Split a span into units of at most room tokens, at the coarsest boundaries that suffice; with their tokens."""
    start, end = span
    # Counting a long text is slow, and it has too many in any case: split it first.
    num_tokens = count(text[start:end]) if end - start <= CHARS_PER_TOKEN * room else None
    if num_tokens is not None and (num_tokens <= room or end - start <= room):
        yield span, num_tokens
    elif end - (text_end := start + len(text[start:end].rstrip())) > CHARS_PER_TOKEN * room:
        if text_end > start:
            yield from _units(text, (start, text_end), room, count, level)
        yield (text_end, end), room + 1  # blank: alone, so that it gets into no chunk
    elif level == len(_BOUNDARIES):
        middle = (start + end) // 2
        yield from _units(text, (start, middle), room, count, level)
        yield from _units(text, (middle, end), room, count, level)
    else:
        for part in _split_at(text, span, _BOUNDARIES[level]):
            yield from _units(text, part, room, count, level + 1)


def _split_at(text: str, span: Span, boundary: re.Pattern[str]) -> Iterator[Span]:
    start, end = span
    for match in _found(boundary, text, span):
        if match.end() > start:
            yield start, match.end()
            start = match.end()
    if start < end:
        yield start, end


def _found(pattern: re.Pattern[str], text: str, span: Span) -> Iterator[re.Match[str]]:
    """What finditer finds, searched window by window: other threads run between two of them."""
    at, end = span
    while at < end:
        window_end = min(at + WINDOW, end)
        match = pattern.search(text, at, window_end)
        if match is None:
            at += WINDOW - WINDOW_OVERLAP
            continue
        if match.end() == window_end:  # it may go on behind the window
            match = pattern.match(text, match.start(), end) or match
        yield match
        at = max(match.end(), match.start() + 1)


def _packed(text: str, units: list[tuple[Span, int]], room: int, overlap: int) -> Iterator[Span]:
    """Join units while they fit; the next chunk starts with an overlap before the end of the last."""
    first = 0
    while first < len(units):
        last, total = first, units[first][1]
        while last + 1 < len(units) and total + units[last + 1][1] <= room:
            last += 1
            total += units[last][1]
        trimmed = _trimmed(text, units[first][0][0], units[last][0][1])
        if trimmed is not None:
            yield trimmed
        if last + 1 == len(units):
            return
        first = _next_first(units, first, last, min(overlap, room - units[last + 1][1]))


def _next_first(units: list[tuple[Span, int]], first: int, last: int, overlap: int) -> int:
    """The first unit of the next chunk: the one after last, or earlier by whole units that fit into the overlap."""
    start, total = last + 1, 0
    while start - 1 > first and total + units[start - 1][1] <= overlap:
        start -= 1
        total += units[start][1]
    return start


def _trimmed(text: str, start: int, end: int) -> Span | None:
    inner = text[start:end]
    left, right = len(inner) - len(inner.lstrip()), len(inner.rstrip())
    return (start + left, start + right) if left < right else None
