"""A text in parts of a bounded number of tokens, split at its own boundaries: paragraphs, lines, sentences, words.

Every part is an exact slice of the text. Knows how tokens are counted by what it is given; knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Count = Callable[[str], int]
Span = tuple[int, int]
MIN_ROOM = 8  # tokens of a part, at least
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


def split_text(text: str, span: Span, room: int, overlap: int, count: Count) -> Iterator[Span]:
    """Parts of a span of a text, of at most room tokens each, blank ones left out; the last units of one part are
    repeated at the start of the next, as far as they fit into the overlap."""
    room = max(room, MIN_ROOM)
    yield from _packed(text, list(_units(text, span, room, count)), room, overlap)


def weighed(count: Count) -> Count:
    """Tokens of a text, and for long words their share: it bounds the characters of a chunk too."""
    return lambda text: max(count(text), -(-len(text) // CHARS_PER_TOKEN))


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
    for match in found_in(boundary, text, span):
        if match.end() > start:
            yield start, match.end()
            start = match.end()
    if start < end:
        yield start, end


def found_in(pattern: re.Pattern[str], text: str, span: Span) -> Iterator[re.Match[str]]:
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
