"""A text of tokens in which the longest repetition of another text's end is found: hashed n-grams, no tree.

Two hash tables, over the last 4 and the last 2 tokens, lead to the newest occurrences, which are compared token by
token: 20 to 28 bytes a token, a few microseconds a lookup, and nothing that grows with what a client sends twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SEPARATOR = 2**31 - 1  # between texts that do not continue each other; no token has this id
NONE = -1
LONG, SHORT = 4, 2  # tokens of the n-grams
MAX_TRIES = 8  # occurrences that are compared
MAX_MATCH = 32  # tokens that are compared of each
FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class Occurrence(NamedTuple):
    """Where the end of a text stands in another: what follows it begins at `at`, and `length` tokens are the same."""

    at: int
    length: int


class SuffixIndex:
    """A growing text; max_tokens: when it has more, the older half is forgotten."""

    def __init__(self, token_ids: Sequence[int] = (), max_tokens: int | None = None) -> None:
        self.token_ids = array("i")
        self.num_forgotten = 0  # changes when positions do
        self._max_tokens = max_tokens
        self._chains = (_Chains(LONG), _Chains(SHORT))
        self._rebuild(array("i", token_ids))

    @property
    def num_bytes(self) -> int:
        """Of the tables and the tokens."""
        return sum(chains.num_bytes for chains in self._chains) + 4 * len(self.token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        for chains in self._chains:
            chains.append(self.token_ids)
        if self._max_tokens is not None and len(self.token_ids) > self._max_tokens:
            kept = self.token_ids[-self._max_tokens // 2 :]
            self.num_forgotten += len(self.token_ids) - len(kept)
            self._rebuild(kept)

    def find(self, end: Sequence[int]) -> Occurrence | None:
        """The longest repetition of a text's end, the newest of those; end: its last MAX_MATCH tokens, or fewer."""
        for chains in self._chains:
            best: Occurrence | None = None
            for last in chains.candidates(end):
                length = self._common(last, end)
                if length >= chains.size and (best is None or length > best.length):
                    best = Occurrence(last + 1, length)
            if best is not None:
                return best
        return None

    def following(self, at: int, max_tokens: int) -> list[int]:
        """What stands there, up to the end of its text; at the end of all, what would repeat itself."""
        found: list[int] = []
        token_ids, period = self.token_ids, len(self.token_ids) - at
        for offset in range(max_tokens):
            token_id = token_ids[at + offset] if offset < period else found[offset - period] if period else SEPARATOR
            if token_id == SEPARATOR:
                break
            found.append(token_id)
        return found

    def _common(self, last: int, end: Sequence[int]) -> int:
        """How many tokens up to position last are the same as the end's."""
        token_ids, most = self.token_ids, min(last + 1, len(end))
        length = 0
        while length < most and token_ids[last - length] == end[-1 - length]:
            length += 1
        return length

    def _rebuild(self, token_ids: array[int]) -> None:
        self.token_ids = token_ids
        for chains in self._chains:
            chains.fill(token_ids)


class _Chains:
    """Positions of n-grams by hash: the newest of each in heads, the one before it in previous[position]."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._heads = array("i")
        self._previous = array("i")

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._heads) + len(self._previous))

    def candidates(self, end: Sequence[int]) -> list[int]:
        """Last positions of n-grams that may be the text's last, the newest first."""
        if len(end) < self.size:
            return []
        found: list[int] = []
        position = self._heads[_hash(end[-self.size :]) & (len(self._heads) - 1)]
        while position != NONE and len(found) < MAX_TRIES:
            found.append(position)
            position = self._previous[position]
        return found

    def append(self, token_ids: array[int]) -> None:
        """The last token is new."""
        position = len(token_ids) - 1
        if position >= len(self._heads):
            self.fill(token_ids)
            return
        self._previous.append(NONE)
        if len(token_ids) >= self.size:
            slot = _hash(token_ids[-self.size :]) & (len(self._heads) - 1)
            self._previous[position] = self._heads[slot]
            self._heads[slot] = position

    def fill(self, token_ids: array[int]) -> None:
        """All at once, for prompts of thousands of tokens."""
        num_slots = 1 << max(6, len(token_ids).bit_length())
        num_grams = max(0, len(token_ids) - self.size + 1)
        ids = np.array(token_ids, np.uint64)
        hashes = np.zeros(num_grams, np.uint64)
        for offset, factor in enumerate(FACTORS[: self.size]):
            hashes ^= ids[offset : offset + num_grams] * np.uint64(factor)
        slots = ((hashes >> np.uint64(11)) & np.uint64(num_slots - 1)).astype(np.int64)
        positions = np.arange(num_grams, dtype=np.int32) + np.int32(self.size - 1)
        heads, previous = np.full(num_slots, NONE, np.int32), np.full(len(token_ids), NONE, np.int32)
        order = np.argsort(slots, kind="stable")
        is_same = slots[order[1:]] == slots[order[:-1]]
        previous[positions[order[1:][is_same]]] = positions[order[:-1][is_same]]
        heads[slots] = positions  # of equal slots the last, the newest, stays
        self._heads, self._previous = array("i", heads.tobytes()), array("i", previous.tobytes())


def _hash(gram: Sequence[int]) -> int:
    found = 0
    for token_id, factor in zip(gram, FACTORS, strict=False):
        found ^= token_id * factor
    return found >> 11
