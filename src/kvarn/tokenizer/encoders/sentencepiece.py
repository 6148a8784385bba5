"""SentencePiece-style BPE (llama, gemma): characters are merged as long as the merged text is a token.

Which pair goes first is decided by scores (llama) or by a list of merges (gemma 4); spaces are written U+2581,
and a character without a token becomes its bytes.
"""

from __future__ import annotations

import re
from itertools import compress

from kvarn.errors import FormatError
from kvarn.tokenizer.encoders.bpe import MERGEABLE_TYPES, MergeRank, WordCache, merge_pieces
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary, token_as_bytes

SPACE = "\u2581"


class SentencePieceEncoder:
    """Merges characters to tokens, word by word where no token spans two words."""

    def __init__(self, vocabulary: Vocabulary, rank: MergeRank, *, space_prefix: bool) -> None:
        self._ids = vocabulary.ids
        self._token_types = vocabulary.token_types
        self._unk_id = vocabulary.unk_id
        self._rank = rank
        self._space_prefix = space_prefix
        self._byte_ids = {int(vocabulary.tokens[i][3:5], 16): i for i in vocabulary.of_type(TokenType.BYTE)}
        self._pattern = _word_pattern(vocabulary)
        self._words = WordCache(self._encode_word)

    @property
    def drops_first_space(self) -> bool:
        """Whether encoding put a space before the text."""
        return self._space_prefix

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text; a space goes before it at the start and after every special token."""
        spaced = text.replace(" ", SPACE)
        words = self._pattern.finditer(SPACE + spaced if self._space_prefix else spaced)
        return self._words.encode(word.group() for word in words)

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal token."""
        return token_as_bytes(token.replace(SPACE, " "))

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for piece in merge_pieces(word, self._rank):
            self._append(ids, piece)
        return ids

    def _append(self, ids: list[int], piece: str) -> None:
        token_id = self._ids.get(piece)
        if token_id is not None and self._token_types[token_id] in MERGEABLE_TYPES:
            ids.append(token_id)
            return
        fallback = [self._byte_ids.get(byte) for byte in piece.encode("utf-8")]
        if None not in fallback:
            ids.extend(fallback)  # type: ignore[arg-type]
        elif self._unk_id is not None and ids[-1:] != [self._unk_id]:
            ids.append(self._unk_id)  # neighbouring unknown characters are one unknown token


def rank_by_score(vocabulary: Vocabulary) -> MergeRank:
    """Rank a pair by the score of the token it makes, highest first."""
    ids, token_types, scores = vocabulary.ids, vocabulary.token_types, vocabulary.scores
    if scores is None:
        raise FormatError("the file has no tokenizer.ggml.scores; convert the model again")

    def rank(left: str, right: str) -> float | None:
        token_id = ids.get(left + right)
        return None if token_id is None or token_types[token_id] not in MERGEABLE_TYPES else -scores[token_id]

    return rank


def _word_pattern(vocabulary: Vocabulary) -> re.Pattern[str]:
    """Return a pattern whose matches are the words of a text: no token reaches from one into the next.

    A word ends before a space, unless the character there stands before a space inside some token.
    """
    is_mergeable = vocabulary.token_types.translate(bytes(token_type in MERGEABLE_TYPES for token_type in range(256)))
    texts = "\0".join(compress(vocabulary.tokens, is_mergeable))
    glue = "".join(map(re.escape, sorted(set(re.findall(f"([^{SPACE}\\0]){SPACE}", texts)))))
    onward = f"(?:(?<=[{glue}]){SPACE}+[^{SPACE}]*)*" if glue else ""
    return re.compile(f"{SPACE}*[^{SPACE}]+{onward}|{SPACE}+")
