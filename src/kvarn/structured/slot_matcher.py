"""The position of one slot of a canvas in its grammar, and a way to its end that always fits. Knows no logits.

A slot has a fixed number of positions and is written from left to right. Whoever takes only tokens after which
completion() is no longer than what is left can always finish it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvarn.structured.matcher import UInt32, allowed_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SEARCHED = 2000  # positions of the grammar that one search for a way to the end looks at
MAX_DEPTH = 6  # tokens of a way that is searched for in full; longer ones are found by trying the first that may follow


class SlotMatcher:
    """Follows the tokens of one slot; start is a matcher at the beginning, which stays there."""

    def __init__(self, start: LLMatcher, allowed: UInt32, single_ids: Sequence[int]) -> None:
        """single_ids: tokens of one byte, in the order in which ways to the end try them."""
        self._matcher = start.deep_copy()
        self._allowed = allowed
        self._single_ids = single_ids

    @property
    def is_accepting(self) -> bool:
        """Whether the slot may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped() or self._matcher.is_error()

    def mask(self) -> UInt32:
        """One bit per token that may follow; tokens that end a text where the slot may end."""
        mask = allowed_mask(self._matcher, self._allowed)
        return np.zeros_like(self._allowed) if mask is None else mask

    def after(self, token_id: int) -> SlotMatcher | None:
        """The position after one more token; None: it may not follow."""
        copy = SlotMatcher(self._matcher, self._allowed, self._single_ids)
        return copy if copy.take(token_id) else None

    def take(self, token_id: int) -> bool:
        """Go on by one token; False: it may not follow."""
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_error()

    def completion(self, max_tokens: int) -> tuple[int, ...] | None:
        """Tokens after which the slot may end, the fewest that were found; None: none within max_tokens."""
        if self.is_accepting:
            return ()
        straight = self._straight_on(max_tokens)
        search = _Search()
        for depth in range(1, min(MAX_DEPTH, len(straight) - 1 if straight else max_tokens) + 1):
            if (found := search.within(self, depth)) is not None:
                return found
        return straight

    def next_ids(self) -> list[int]:
        """Tokens to try on a way to the end: those that are forced, else single bytes, else any."""
        if forced := self._matcher.compute_ff_tokens():
            return [forced[0]]
        mask = self.mask()
        single = [token_id for token_id in self._single_ids if has_bit(mask, token_id)]
        return single or np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:64].tolist()

    def _straight_on(self, max_tokens: int) -> tuple[int, ...] | None:
        """The way that takes the first token each time."""
        at = SlotMatcher(self._matcher, self._allowed, self._single_ids)
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            following = at.next_ids()
            if not following or not at.take(following[0]):
                return None
            tokens.append(following[0])
            if at.is_accepting:
                return tuple(tokens)
        return None


class _Search:
    """A search of all short ways, bounded in what it looks at."""

    def __init__(self) -> None:
        self._num_left = MAX_SEARCHED

    def within(self, at: SlotMatcher, depth: int) -> tuple[int, ...] | None:
        for token_id in at.next_ids():
            self._num_left -= 1
            if self._num_left < 0:
                return None
            following = at.after(token_id)
            if following is None:
                continue
            if following.is_accepting:
                return (token_id,)
            if depth > 1 and (rest := self.within(following, depth - 1)) is not None:
                return (token_id, *rest)
        return None


def has_bit(mask: UInt32, token_id: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
