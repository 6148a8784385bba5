"""Unigram (T5, XLM-RoBERTa): the most probable way to cut a text into tokens, by their scores.

Texts are prepared as sentencepiece does it: characters mapped by the file's table, runs of spaces made one, a space
put before the text and written U+2581.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from kvarn.errors import FormatError
from kvarn.tokenizer.encoders.bpe import MERGEABLE_TYPES
from kvarn.tokenizer.encoders.encoder import encode_plain, vocabulary_errors
from kvarn.tokenizer.encoders.sentencepiece import SPACE
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary, read_flag, token_as_bytes

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
MAX_CHARSMAP_BYTES = 16 << 20  # the usual one has 240,000
# What text never becomes, whatever a user types: with a name that nobody can write.
_HIDDEN_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED})


class UnigramEncoder:
    """A tokenizers Unigram model behind sentencepiece's normaliser."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        if vocabulary.unk_id is None or vocabulary.scores is None:
            missing = "unknown_token_id" if vocabulary.unk_id is None else "scores"
            raise FormatError(f"a unigram vocabulary needs tokenizer.ggml.{missing}; convert the model again")
        if vocabulary.unk_id in (vocabulary.bos_id, *vocabulary.eos_ids):  # users' text would begin or end texts
            raise FormatError(
                f"the unknown token, {vocabulary.unk_id}, also begins or ends texts; convert the model again"
            )
        self.drops_first_space = bool(read_flag(metadata, "add_space_prefix", False))
        falls_back = bool(vocabulary.of_type(TokenType.BYTE))
        with vocabulary_errors():
            model = models.Unigram(_pieces(vocabulary, vocabulary.scores), vocabulary.unk_id, falls_back)
            self._tokenizer = Tokenizer(model)
            self._tokenizer.normalizer = _normalizer(metadata, space_prefix=self.drops_first_space)
            self._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never", split=not _spans_words(vocabulary))

    def encode(self, text: str, *, at_start: bool) -> list[int]:  # noqa: ARG002
        """Return the ids of plain text."""
        return encode_plain(self._tokenizer, text)

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal token."""
        return token_as_bytes(token.replace(SPACE, " "))


def _pieces(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, float]]:
    """Texts and scores by id."""
    secret = secrets.token_hex(16)
    return [
        (f"[{secret} {token_id}]" if kind in _HIDDEN_TYPES or not text else _utf8(text), score)
        for token_id, (text, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.token_types, scores, strict=True)
        )
    ]


def _utf8(text: str) -> str:
    return token_as_bytes(text).decode("utf-8", "replace")


def _spans_words(vocabulary: Vocabulary) -> bool:
    """Whether a token has a space after its beginning: then words cannot be cut one by one."""
    is_used = vocabulary.token_types.translate(bytes(kind in MERGEABLE_TYPES for kind in range(256)))
    return any(SPACE in text[1:] for text in compress(vocabulary.tokens, is_used))


def _normalizer(metadata: Mapping[str, Any], *, space_prefix: bool) -> Normalizer:
    from tokenizers import Regex, normalizers

    steps: list[Normalizer] = []
    if table := _charsmap(metadata.get(CHARSMAP)):
        steps.append(normalizers.Precompiled(table))
    if read_flag(metadata, "remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    if space_prefix:
        steps.append(normalizers.Prepend(SPACE))  # Metaspace puts none before a text that begins with one
    return normalizers.Sequence(steps)


def _charsmap(value: Any) -> bytes:
    numbers = value.tolist() if hasattr(value, "tolist") else value or b""
    try:
        if len(numbers) > MAX_CHARSMAP_BYTES:
            raise ValueError(f"{len(numbers):,} bytes")
        return bytes(numbers)
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"{CHARSMAP} is no table of at most {MAX_CHARSMAP_BYTES:,} bytes; get the model file again"
        ) from error
