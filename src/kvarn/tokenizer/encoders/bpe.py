"""Byte-pair encoding: merge neighbouring pieces of a word, best pair first, and cache the words done.

In Python on purpose: the tokenizers package needs every merge in a table of its own, which costs a tenth of a second
and twice the memory at start (a second for 262,000 tokens), while words repeat and are looked up here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise

from kvarn.cancellation import require_wanted
from kvarn.errors import FormatError
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary

MAX_CACHED_WORDS = 1 << 16
MAX_CACHED_LENGTH = 64
WORDS_AT_ONCE = 1024  # between two questions whether they are still wanted

# Types that plain text may become. Control and byte tokens are not among them, whatever a user types.
MERGEABLE_TYPES = frozenset({TokenType.UNDEFINED, TokenType.NORMAL, TokenType.USER_DEFINED})

MergeRank = Callable[[str, str], float | None]  # of merging two neighbours: the smallest goes first; None: never


class WordCache:
    """Encodes words, each distinct one once."""

    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        self._encode_word = encode_word
        self._ids: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of all words in order."""
        ids: list[int] = []
        left = iter(words)
        while some := list(islice(left, WORDS_AT_ONCE)):
            require_wanted()
            for word in some:
                found = self._ids.get(word)
                ids += self._encode_new(word) if found is None else found
        return ids

    def _encode_new(self, word: str) -> list[int]:
        ids = self._encode_word(word)
        if len(word) <= MAX_CACHED_LENGTH:
            if len(self._ids) >= MAX_CACHED_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def merge_pieces(word: str, rank: MergeRank) -> list[str]:
    """Merge neighbouring pieces, best rank first and leftmost among equals, until no pair has a rank."""
    parts = list(word)  # a piece that was merged into the one before it becomes ""
    count = len(parts)
    after = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    # rank, left, right, length of both
    queue = [(found, i, i + 1, 2) for i, pair in enumerate(pairwise(parts)) if (found := rank(*pair)) is not None]
    heapq.heapify(queue)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        first, second = parts[left], parts[right]
        if not first or not second or len(first) + len(second) != length:
            continue  # one of them was merged elsewhere meanwhile
        parts[left], parts[right] = merged, _ = first + second, ""
        after[left] = following = after[right]
        if following < count:
            before[following] = left
            if (found := rank(merged, parts[following])) is not None:
                heapq.heappush(queue, (found, left, following, len(merged) + len(parts[following])))
        if (previous := before[left]) >= 0 and (found := rank(parts[previous], merged)) is not None:
            heapq.heappush(queue, (found, previous, left, len(parts[previous]) + len(merged)))
    return [part for part in parts if part]


def rank_by_merges(vocabulary: Vocabulary, merges: Sequence[str]) -> MergeRank:
    """Rank a pair by its index in the list of merges."""
    _check_merges(vocabulary, merges)
    ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))  # the first of equal ones counts

    def rank(left: str, right: str) -> float | None:
        return ranks.get(f"{left} {right}")

    return rank


def rank_by_token(vocabulary: Vocabulary) -> MergeRank:
    """Rank a pair by the id of the token that it makes, as lists of ranks have it."""
    ranks = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.of_type(TokenType.NORMAL)}
    return lambda left, right: ranks.get(left + right)


def _check_merges(vocabulary: Vocabulary, merges: Sequence[str]) -> None:
    ids = vocabulary.ids
    for left, _, right in (merge.partition(" ") for merge in merges):
        if left not in ids or right not in ids or left + right not in ids:
            raise FormatError(
                f"merge {f'{left} {right}'[:80]!r} names a token that is not in the vocabulary; "
                "get the model file again"
            )
