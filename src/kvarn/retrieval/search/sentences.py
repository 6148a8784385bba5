"""Texts to sentences, by punctuation and line breaks: answers to what they claim, sources to what they say."""

from __future__ import annotations

import re

# A full stop ends a sentence where no small letter follows: "e.g. this" goes on, and 0.5 has no space behind its dot.
# A line break ends one before an item, a heading, a row of a table or an empty line; other lines are wrapped text.
_BREAK = re.compile(
    r"(?<=[.!?…])[\"'”’)\]*_`]*(?:[ \t]*\[\d+\])*(?:[ \t]+|[ \t]*\n)(?![a-z]|\[\d)"
    r"|(?<=[。！？])"
    r"|\n(?=[ \t]*(?:\n|[-*+•|#>]|\d+[.)]))"
)
_EDGE = " \t\r\n"
_MARKER = re.compile(r"(?:[-*+•>#|]+|\d+[.)])(?:\s+|$)")
_CITED = re.compile(r"(?<!\s)\s*\[\d+\]")  # begins where white space does: a million blanks are looked at once


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Where the sentences of a text are, in order, without white space and markers of lists around them."""
    spans, start = [], 0
    for found in _BREAK.finditer(text):
        spans.append((start, found.end()))
        start = found.end()
    spans.append((start, len(text)))
    trimmed = (_trimmed(text, *span) for span in spans)
    return [(start, end) for start, end in trimmed if end > start]


def without_markers(sentence: str) -> str:
    """A sentence without the numbers of sources that a model has written into it."""
    return _CITED.sub("", sentence)


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start] in _EDGE:
        start += 1
    while end > start and text[end - 1] in _EDGE:
        end -= 1
    marker = _MARKER.match(text, start, end)
    return (marker.end() if marker is not None else start), end
