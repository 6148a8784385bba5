"""Byte-level BPE (GPT-2 and most models since): every byte is a printable character, merges are listed in the file."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvarn.tokenizer.encoders.bpe import MERGEABLE_TYPES, WordCache, merge_pieces, rank_by_merges, rank_by_token
from kvarn.tokenizer.encoders.encoder import vocabulary_errors
from kvarn.tokenizer.encoders.pretokenize import PreTokenizerRule, build_pre_tokenizer, split_long_text
from kvarn.tokenizer.vocabulary import Vocabulary, merge_pairs, token_as_bytes

if TYPE_CHECKING:
    from tokenizers.models import BPE

MAX_WORD_LENGTH = 1024  # longer words are no natural text; they go to the tokenizers package, which releases the GIL


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = byte_of_character()


def text_bytes(token: str) -> bytes:
    """Return the bytes a byte-level token stands for; text outside the table stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token_as_bytes(token)


class ByteLevelEncoder:
    """Splits text into words with the tokenizers package and merges their bytes to tokens.

    Without merges, the pair that makes the token with the lowest id goes first, and a word that is a token stays whole.
    """

    drops_first_space = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str] | None, rule: PreTokenizerRule) -> None:
        self._ids = vocabulary.ids
        self._token_types = vocabulary.token_types
        self._merges = merges
        self._rule = rule
        self._rank = rank_by_token(vocabulary) if merges is None else rank_by_merges(vocabulary, merges)
        self._keeps_words = rule.ignore_merges or merges is None
        self._words = WordCache(self._encode_word)
        with vocabulary_errors():
            self._splitter = build_pre_tokenizer(rule)

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text."""
        composed = unicodedata.normalize("NFC", text) if self._rule.nfc else text
        return self._words.encode(
            word for chunk in split_long_text(composed) for word, _ in self._splitter.pre_tokenize_str(chunk)
        )

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal token."""
        return text_bytes(token)

    def _encode_word(self, word: str) -> list[int]:
        if self._keeps_words and self._is_token(word):
            return [self._ids[word]]
        ids: list[int] = []
        for piece in self._pieces(word):
            parts = [piece] if self._is_token(piece) else piece
            ids += [self._ids[part] for part in parts if self._is_token(part)]
        return ids

    def _pieces(self, word: str) -> list[str]:
        if len(word) <= MAX_WORD_LENGTH or self._merges is None:
            return merge_pieces(word, self._rank)
        return [token.value for token in self._model.tokenize(word)]

    def _is_token(self, text: str) -> bool:
        token_id = self._ids.get(text)
        return token_id is not None and self._token_types[token_id] in MERGEABLE_TYPES

    @cached_property
    def _model(self) -> BPE:
        from tokenizers.models import BPE

        assert self._merges is not None
        with vocabulary_errors():
            return BPE(dict(self._ids), merge_pairs(self._merges))
