"""WordPiece (BERT): lower-cased words, the longest token first.

GGUF writes the beginning of a word with U+2581 before it and the rest without BERT's "##"; the tokenizers
package wants it the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.errors import FormatError
from kvarn.tokenizer.encoders.encoder import encode_plain, vocabulary_errors
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary, read_flag, token_as_bytes

WORD_START = "\u2581"


class WordPieceEncoder:
    """A tokenizers WordPiece model behind BERT's normaliser and pre-tokeniser."""

    drops_first_space = True

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        if vocabulary.unk_id is None:
            raise FormatError("a WordPiece vocabulary needs tokenizer.ggml.unknown_token_id; convert the model again")
        lowercase = bool(read_flag(metadata, "normalizer.lowercase", True))
        strip_accents = read_flag(metadata, "normalizer.strip_accents", None)  # None: as lowercase
        with vocabulary_errors():
            unk = vocabulary.tokens[vocabulary.unk_id]
            model = models.WordPiece(_bert_vocabulary(vocabulary), unk_token=unk, max_input_chars_per_word=100)
            self._tokenizer = Tokenizer(model)
            self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
            self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text."""
        return encode_plain(self._tokenizer, text)

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a token, a space before it if it begins a word."""
        return token_as_bytes(token.replace(WORD_START, " ", 1))


def _bert_vocabulary(vocabulary: Vocabulary) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token_id, (token, token_type) in enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True)):
        ids[_bert_text(token, token_type)] = token_id
    if len(ids) != len(vocabulary.tokens):
        raise FormatError(
            "two WordPiece tokens have the same text once U+2581 and ## are taken away; get the model file again"
        )
    return ids


def _bert_text(token: str, token_type: int) -> str:
    if token.startswith(WORD_START):
        return token[1:]
    is_special = token_type not in (TokenType.NORMAL, TokenType.UNDEFINED)
    is_bracketed = token.startswith("[") and token.endswith("]")
    return token if is_special or is_bracketed else f"##{token}"
