"""Find special tokens written in a text: control tokens of templates, and user-defined tokens.

The leftmost match wins, then the longest. Knows texts and ids; never encodes anything.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# Unicode's White_Space, as the tokenizers package strips it.
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_LETTER = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class MatchRules:
    """Ids of tokens with a rule of their own about the text beside them."""

    lstrip: frozenset[int] = frozenset()  # the white space before them belongs to them
    rstrip: frozenset[int] = frozenset()  # and after them
    single_word: frozenset[int] = frozenset()  # no letter or digit may stand beside them


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, and the one token it is, or None where it is plain text."""

    text: str
    token_id: int | None


class SpecialMatcher:
    """Splits text at the occurrences of a set of tokens."""

    def __init__(self, ids: Mapping[str, int], rules: MatchRules | None = None) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._rules = rules or MatchRules()
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
            before = text[done:start].rstrip(_WHITESPACE) if token_id in self._rules.lstrip else text[done:start]
            if before:
                yield Segment(before, None)
            yield Segment(text[start:end], token_id)
            done = end
            while token_id in self._rules.rstrip and done < len(text) and text[done] in _WHITESPACE:
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
                token_id = self._ids.get(text[start:end])
                if (
                    token_id is not None
                    and not _covers(start, end, plain)
                    and self._may_stand(token_id, text, start, end)
                ):
                    return end
        return None

    def _may_stand(self, token_id: int, text: str, start: int, end: int) -> bool:
        if token_id not in self._rules.single_word:
            return True
        return not (start and _LETTER.match(text, start - 1)) and not _LETTER.match(text, end)

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
