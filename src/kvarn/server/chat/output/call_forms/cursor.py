"""Read a text that is still growing: what needs more text waits in a generator, what cannot be is Impossible.

Every reader is a generator that yields where the text ends and returns what it read; it reads each character once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE

T = TypeVar("T")
Reading = Generator[None, None, T]  # returns a T; yields to wait for more text

WORD_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


class Impossible(Exception):
    """The character at the cursor rules out what is being read."""


class TextCursor:
    """A growing text and the first character of it that was not read."""

    def __init__(self, at: int) -> None:
        self.text = ""
        self.at = at

    def peek(self) -> Reading[str]:
        """The next character."""
        while self.at >= len(self.text):
            yield
        return self.text[self.at]

    def space(self) -> Reading[None]:
        """Skip white space."""
        while (yield from self.peek()) in WHITESPACE:
            self.at += 1

    def run(self, is_part: Callable[[str], bool]) -> Reading[str]:
        """Characters up to the first that is no part."""
        start = self.at
        while is_part((yield from self.peek())):
            self.at += 1
        return self.text[start : self.at]

    def literal(self, word: str) -> Reading[None]:
        """Exactly this text, after any white space."""
        yield from self.one_of((word,))

    def one_of(self, words: Sequence[str]) -> Reading[int]:
        """Which of several texts stands here, after any white space; none of them begins another."""
        yield from self.space()
        left = [(index, word.strip(WHITESPACE)) for index, word in enumerate(words)]
        for offset in range(max(len(word) for _, word in left)):
            character = yield from self.peek()
            left = [(index, word) for index, word in left if word[offset : offset + 1] == character]
            if not left:
                raise Impossible
            self.at += 1
            if len(left[0][1]) == offset + 1:
                return left[0][0]
        raise AssertionError("words must not be empty")

    def until(self, word: str) -> Reading[str]:
        """Everything before a text, which is read too."""
        start, sought = self.at, self.at
        while (found := self.text.find(word, sought)) < 0:
            sought = max(start, len(self.text) - len(word) + 1)
            yield
        self.at = found + len(word)
        return self.text[start:found]
