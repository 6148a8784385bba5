"""The position of one slot of a canvas in its grammar, and a way to its end that always fits. Knows no logits.

A slot has a fixed number of positions and is written from left to right. Whoever takes only tokens after which a way
is known that is no longer than what is left can always finish it. Searches are bounded by the positions they look at,
never by a clock: the same tokens have the same ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvarn.structured.matcher import UInt32, allowed_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Int64 = npt.NDArray[np.int64]

MAX_SEARCHED = 2000  # positions of the grammar that one search for a way to the end looks at
MAX_DEPTH = 6  # tokens of a way that is searched for in full; longer ones are found by trying the first that may follow

ORDERS: tuple[Callable[[list[int], int], int], ...] = (  # which of the tokens that may follow a straight way takes
    lambda token_ids, _: token_ids[0],
    lambda token_ids, _: token_ids[-1],
    lambda token_ids, at: token_ids[at % len(token_ids)],
)


class SlotMatcher:
    """Follows the tokens of one slot; start is a matcher at the beginning, which stays there."""

    def __init__(self, start: LLMatcher, allowed: UInt32, single_ids: Int64, trie: LLTokenizer) -> None:
        """single_ids: tokens of one byte, in the order in which ways to the end try them."""
        self._matcher = start.deep_copy()
        self._allowed = allowed
        self._single_ids = single_ids
        self._trie = trie

    @property
    def is_accepting(self) -> bool:
        """Whether the slot may end here."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped() or self._matcher.is_error()

    @property
    def is_failed(self) -> bool:
        """Whether a limit of the grammar was reached: nothing more is known from here."""
        return self._matcher.is_error()

    def mask(self) -> UInt32:
        """One bit per token that may follow; tokens that end a text where the slot may end."""
        mask = allowed_mask(self._matcher, self._allowed)
        return np.zeros_like(self._allowed) if mask is None else mask

    def copy(self) -> SlotMatcher:
        """Another one at the same position."""
        return SlotMatcher(self._matcher, self._allowed, self._single_ids, self._trie)

    def after(self, token_id: int) -> SlotMatcher | None:
        """The position after one more token; None: it may not follow."""
        copy = self.copy()
        return copy if copy.take(token_id) else None

    def take(self, token_id: int) -> bool:
        """Go on by one token; False: it may not follow."""
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_error()

    def completion(self, max_tokens: int, max_searched: int | None = None) -> tuple[int, ...] | None:
        """Tokens after which the slot may end, the fewest that were found; None: none was found within max_tokens.

        max_searched: positions to look at in all; None: as many as a rule that is new deserves.
        """
        if self.is_accepting:
            return ()
        straight = self._straight(max_tokens if max_searched is None else min(max_tokens, max_searched // 6))
        search = _Search(MAX_SEARCHED if max_searched is None else max_searched // 2)
        for depth in range(1, min(MAX_DEPTH, len(straight) - 1 if straight else max_tokens) + 1):
            if search.num_left <= 0:
                break
            if (found := search.within(self, depth)) is not None:
                return found
        return straight

    def completion_like(self, way: Sequence[int], token_id: int, max_tokens: int) -> tuple[int, ...] | None:
        """A way from here that is the end of one from the position before token_id: without a search, as often fits.

        Of a way through "[a-z]{9}" as many bytes are left out as the token has; of one that closes what is open, none.
        """
        for left_out in dict.fromkeys((len(self._trie.decode_bytes([token_id])), 0, 1)):
            rest = self._without_bytes(way, left_out)
            if rest is not None and len(rest) <= max_tokens and self._ends_with(rest):
                return rest
        return None

    def next_ids(self) -> list[int]:
        """Tokens to try on a way to the end: those that are forced, else single bytes, else any."""
        if forced := self._matcher.compute_ff_tokens():
            return [forced[0]]
        mask = self.mask()
        ids = self._single_ids
        single: list[int] = ids[(mask[ids >> 5] >> (ids & 31).astype(np.uint32) & np.uint32(1)).astype(bool)].tolist()
        return single or np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:64].tolist()

    def _without_bytes(self, way: Sequence[int], num_bytes: int) -> tuple[int, ...] | None:
        """The way without its first bytes; None: a token of it lies across."""
        for index, token_id in enumerate(way):
            if num_bytes <= 0:
                return tuple(way[index:]) if num_bytes == 0 else None
            num_bytes -= len(self._trie.decode_bytes([token_id]))
        return () if num_bytes == 0 else None

    def _ends_with(self, token_ids: Sequence[int]) -> bool:
        matcher = self._matcher.deep_copy()
        return bool(matcher.consume_tokens(list(token_ids))) and not matcher.is_error() and matcher.is_accepting()

    def _straight(self, max_tokens: int) -> tuple[int, ...] | None:
        """The shortest of the ways that take the first token each time, the last, or another each time."""
        shortest: tuple[int, ...] | None = None
        for choose in ORDERS:
            found = self._straight_on(max_tokens if shortest is None else len(shortest) - 1, choose)
            shortest = shortest if found is None else found
        return shortest

    def _straight_on(self, max_tokens: int, choose: Callable[[list[int], int], int]) -> tuple[int, ...] | None:
        at = self.copy()
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            following = at.next_ids()
            if not following or not at.take(token_id := choose(following, len(tokens))):
                return None
            tokens.append(token_id)
            if at.is_accepting:
                return tuple(tokens)
        return None


class _Search:
    """A search of all short ways, bounded in what it looks at."""

    def __init__(self, max_searched: int) -> None:
        self.num_left = max_searched

    def within(self, at: SlotMatcher, depth: int) -> tuple[int, ...] | None:
        for token_id in at.next_ids():
            self.num_left -= 1
            if self.num_left < 0:
                return None
            following = at.after(token_id)
            if following is None:
                continue
            if following.is_accepting:
                return (token_id,)
            if depth > 1 and (rest := self.within(following, depth - 1)) is not None:
                return (token_id, *rest)
        return None
