"""Find special tokens written in a text: control tokens of templates, and user-defined tokens.

The leftmost match wins, then the longest. Knows texts and ids; never encodes anything.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, and the one token it is, or None where it is plain text."""

    text: str
    token_id: int | None


class SpecialMatcher:
    """Splits text at the occurrences of a set of tokens."""

    def __init__(
        self, ids: Mapping[str, int], *, lstrip: frozenset[int] = frozenset(), rstrip: frozenset[int] = frozenset()
    ) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._lstrip = lstrip  # tokens that strip the white space before them
        self._rstrip = rstrip  # and after them
        # A token is found by its first two characters, then by length: "<u" -> [13, 12, 11].
        self._lengths = _lengths_by_head(self._ids)
        self._heads = re.compile("|".join(map(re.escape, sorted(self._lengths, key=len, reverse=True))) or r"(?!)")

    def split(self, text: str, plain: Sequence[int] = ()) -> Iterator[Segment]:
        """Yield the segments of text in order; no token covers a character whose offset is in plain (ascending)."""
        done = 0
        for start in self._candidates(text):
            if start < done:
                continue
            end = self._match(text, start, plain)
            if end is None:
                continue
            token_id = self._ids[text[start:end]]
            before = text[done:start].rstrip(_WHITESPACE) if token_id in self._lstrip else text[done:start]
            if before:
                yield Segment(before, None)
            yield Segment(text[start:end], token_id)
            done = end
            while token_id in self._rstrip and done < len(text) and text[done] in _WHITESPACE:
                done += 1
        if done < len(text):
            yield Segment(text[done:], None)

    def possible_starts(self, text: str) -> list[int]:
        """Return the offsets at which one of the tokens begins in text, or would if the right text followed it."""
        whole = [start for start in self._candidates(text) if self._match(text, start, ()) is not None]
        tail = max(0, len(text) - self._longest + 1)
        partial = [start for start in range(tail, len(text)) if text[start:] in self._prefixes]
        return sorted({*whole, *partial})

    def _candidates(self, text: str) -> Iterator[int]:
        position = 0
        while (head := self._heads.search(text, position)) is not None:
            yield head.start()
            position = head.start() + 1

    def _match(self, text: str, start: int, plain: Sequence[int]) -> int | None:
        for width in (2, 1):
            for length in self._lengths.get(text[start : start + width], ()):
                end = start + length
                if text[start:end] in self._ids and not _covers(start, end, plain):
                    return end
        return None

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(text[:length] for text in self._ids for length in range(1, len(text)))


def _lengths_by_head(ids: Mapping[str, int]) -> dict[str, list[int]]:
    lengths: dict[str, set[int]] = {}
    for text in ids:
        lengths.setdefault(text[:2], set()).add(len(text))
    return {head: sorted(found, reverse=True) for head, found in lengths.items()}


def _covers(start: int, end: int, plain: Sequence[int]) -> bool:
    first = bisect_left(plain, start)
    return first < len(plain) and plain[first] < end
