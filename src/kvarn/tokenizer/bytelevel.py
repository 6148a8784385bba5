"""Byte-level BPE (GPT-2 and most models since): every byte is a printable character, merges are listed in the file."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import cast

from kvarn.errors import FormatError
from kvarn.tokenizer.encoder import vocabulary_errors
from kvarn.tokenizer.pretokenize import WordRule, pre_tokenizer
from kvarn.tokenizer.vocabulary import Vocabulary, token_as_bytes


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
    """A tokenizers BPE model behind a pre-tokeniser."""

    drops_first_space = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], rule: WordRule) -> None:
        from tokenizers import Tokenizer, models

        with vocabulary_errors():
            model = models.BPE(vocabulary.ids, merge_pairs(merges), ignore_merges=rule.ignore_merges)  # type: ignore[arg-type]
            self._tokenizer = Tokenizer(model)
            self._tokenizer.pre_tokenizer = pre_tokenizer(rule)
        self._nfc = rule.nfc

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text."""
        composed = unicodedata.normalize("NFC", text) if self._nfc else text
        ids: list[int] = self._tokenizer.encode(composed, add_special_tokens=False).ids
        return ids

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal token."""
        return text_bytes(token)


def merge_pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Return "left right" lines as pairs."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not set(map(len, pairs)) <= {2}:
        bad = next(merge for merge in merges if merge.count(" ") != 1)
        raise FormatError(f"merge {bad[:80]!r} is not two tokens with one space between them")
    return cast("list[tuple[str, str]]", pairs)
