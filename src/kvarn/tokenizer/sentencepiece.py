"""SentencePiece-style BPE (llama, gemma): characters are joined as long as the joined text is a token.

Which pair goes first is decided by scores (llama) or by a list of merges (gemma 4); spaces are written U+2581,
and a character without a token becomes its bytes. In Python on purpose: deriving the merge list that the
tokenizers package wants takes over a second for 262,000 tokens, while words repeat and are remembered.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from itertools import compress

from kvarn.errors import FormatError
from kvarn.tokenizer.vocabulary import Kind, Vocabulary, token_as_bytes

SPACE = "\u2581"
MAX_REMEMBERED_WORDS = 1 << 16
MAX_REMEMBERED_LENGTH = 64

Rank = Callable[[str, str], float | None]  # of joining two neighbours: the smallest goes first; None: never


class SentencePieceEncoder:
    """Joins characters to tokens, word by word where no token spans two words."""

    def __init__(self, vocabulary: Vocabulary, rank: Rank, *, space_prefix: bool) -> None:
        self._ids = vocabulary.ids
        self._kinds = vocabulary.kinds
        self._unk_id = vocabulary.unk_id
        self._rank = rank
        self._space_prefix = space_prefix
        self._byte_ids = {int(vocabulary.tokens[i][3:5], 16): i for i in vocabulary.of_kind(Kind.BYTE)}
        self._words = _word_pattern(vocabulary)
        self._remembered: dict[str, tuple[int, ...]] = {}

    @property
    def drops_first_space(self) -> bool:
        """Whether encoding put a space before the text."""
        return self._space_prefix

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text; a space goes before it at the start and after every special token."""
        spaced = text.replace(" ", SPACE)
        if self._space_prefix:
            spaced = SPACE + spaced
        ids: list[int] = []
        for word in self._words.findall(spaced):
            ids.extend(self._remembered.get(word) or self._encode_word(word))
        return ids

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal or byte token."""
        return token_as_bytes(token.replace(SPACE, " "))

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in join_pieces(word, self._rank):
            self._append(ids, piece)
        found = tuple(ids)
        if len(word) <= MAX_REMEMBERED_LENGTH:
            if len(self._remembered) >= MAX_REMEMBERED_WORDS:
                self._remembered.clear()
            self._remembered[word] = found
        return found

    def _append(self, ids: list[int], piece: str) -> None:
        token_id = self._ids.get(piece)
        if token_id is not None and self._kinds[token_id] in JOINABLE:
            ids.append(token_id)
            return
        fallback = [self._byte_ids.get(byte) for byte in piece.encode("utf-8")]
        if None not in fallback:
            ids.extend(fallback)  # type: ignore[arg-type]
        elif self._unk_id is not None and ids[-1:] != [self._unk_id]:
            ids.append(self._unk_id)  # neighbouring unknown characters are one unknown token


# Kinds that plain text may become. Control and byte tokens are not among them, whatever a user types.
JOINABLE = frozenset({Kind.UNDEFINED, Kind.NORMAL, Kind.USER_DEFINED})


def rank_by_score(vocabulary: Vocabulary) -> Rank:
    """Rank a pair by the score of the token it makes, highest first."""
    ids, kinds, scores = vocabulary.ids, vocabulary.kinds, vocabulary.scores
    if scores is None:
        raise FormatError("the file has no tokenizer.ggml.scores; convert the model again")

    def rank(left: str, right: str) -> float | None:
        token_id = ids.get(left + right)
        return None if token_id is None or kinds[token_id] not in JOINABLE else -scores[token_id]

    return rank


def rank_by_merges(vocabulary: Vocabulary, merges: Sequence[str]) -> Rank:
    """Rank a pair by its place in the list of merges."""
    _check_merges(vocabulary, merges)
    places = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))  # of equal ones the first counts

    def rank(left: str, right: str) -> float | None:
        return places.get(f"{left} {right}")

    return rank


def join_pieces(word: str, rank: Rank) -> list[str]:
    """Join neighbouring pieces, best rank first and leftmost among equals, until no pair has a rank."""
    parts: list[str | None] = list(word)
    count = len(parts)
    after = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    queue: list[tuple[float, int, int, int]] = []  # rank, left, right, length of both

    def consider(left: int, right: int) -> None:
        first, second = parts[left], parts[right]
        assert first is not None
        assert second is not None
        found = rank(first, second)
        if found is not None:
            heapq.heappush(queue, (found, left, right, len(first) + len(second)))

    for left in range(count - 1):
        consider(left, left + 1)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        first, second = parts[left], parts[right]
        if first is None or second is None or len(first) + len(second) != length:
            continue  # one of them was joined elsewhere meanwhile
        parts[left], parts[right] = first + second, None
        after[left] = following = after[right]
        if following < count:
            before[following] = left
            consider(left, following)
        if before[left] >= 0:
            consider(before[left], left)
    return [part for part in parts if part is not None]


def _word_pattern(vocabulary: Vocabulary) -> re.Pattern[str]:
    """Return a pattern whose matches are the words of a text: no token reaches from one into the next.

    A word ends before a space, unless the character there stands before a space inside some token.
    """
    is_joinable = vocabulary.kinds.translate(bytes(kind in JOINABLE for kind in range(256)))
    joined = "\0".join(compress(vocabulary.tokens, is_joinable))
    glue = "".join(map(re.escape, sorted(set(re.findall(f"([^{SPACE}\\0]){SPACE}", joined)))))
    onward = f"(?:(?<=[{glue}]){SPACE}+[^{SPACE}]*)*" if glue else ""
    return re.compile(f"{SPACE}*[^{SPACE}]+{onward}|{SPACE}+")


def _check_merges(vocabulary: Vocabulary, merges: Sequence[str]) -> None:
    ids = vocabulary.ids
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise FormatError(f"merge {merge!r:.80} names a token that is not in the vocabulary")
