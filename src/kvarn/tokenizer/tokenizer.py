"""Text to ids and back, for one model: a plain encoder, plus special tokens, bos and eos, and chats.

User text never becomes a control token unless the caller asks with parse_special.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

from kvarn.checks import is_iterable, short
from kvarn.errors import FormatError, InvalidParameter
from kvarn.tokenizer.encoders.encoder import TextEncoder
from kvarn.tokenizer.fim import FimTokens
from kvarn.tokenizer.special_tokens import MatchRules, SpecialMatcher
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary, token_as_bytes

if TYPE_CHECKING:
    from kvarn.types import Message


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """All a Tokenizer is made of."""

    vocabulary: Vocabulary
    encoder: TextEncoder
    prefix_ids: tuple[int, ...] = ()  # put before a text, such as bos
    suffix_ids: tuple[int, ...] = ()  # put after it
    between_ids: tuple[int, ...] | None = None  # put between two texts read together; None: what is put after one
    second_segment: bool = True  # whether the second of two texts has a token type of its own, where a model has types
    chat_template: str | None = None
    rerank_template: str | None = None  # with {query} and {document}
    rules: MatchRules | None = None  # of special tokens


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._vocabulary = parts.vocabulary
        self._token_types = parts.vocabulary.token_types
        self._piece_cache: dict[int, tuple[bytes, bool]] = {}
        self._encoder = parts.encoder

    @property
    def vocabulary(self) -> Vocabulary:
        """Token texts and types by id."""
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self._vocabulary.tokens)

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids that stand for no token: holes and padding; never one that ends a text."""
        return frozenset(self._vocabulary.of_type(TokenType.UNUSED)) - {*self.eos_ids, self.bos_id}

    @cached_property
    def unknown_ids(self) -> frozenset[int]:
        """Ids that stand for text the vocabulary does not have."""
        return frozenset(self._vocabulary.of_type(TokenType.UNKNOWN))

    def fitted(self, num_rows: int) -> Tokenizer:
        """The same tokenizer for a model with num_rows ids: those without a token are unused, tokens beyond refused."""
        if num_rows == self.vocab_size:
            return self
        if num_rows > self.vocab_size:
            return Tokenizer(replace(self._parts, vocabulary=self._vocabulary.padded(num_rows)))
        beyond = [token_id for token_id in (*self._parts.prefix_ids, *self._parts.suffix_ids) if token_id >= num_rows]
        if beyond:
            raise FormatError(
                f"every text gets token {beyond[0]:,}, the model has {num_rows:,} rows for tokens; "
                "the tokenizer is of another model",
            )
        return Tokenizer(replace(self._parts, vocabulary=self._vocabulary.cut(num_rows)))

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a text or a turn."""
        return self._vocabulary.eos_ids

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What encode puts before a text, such as bos."""
        return self._parts.prefix_ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts that a model reads together; what stands between them belongs to the first."""
        prefix, suffix, between = self._parts.prefix_ids, self._parts.suffix_ids, self._parts.between_ids
        one, other = (self.encode(text, add_special=False) for text in (first, second))
        return [*prefix, *one, *(suffix if between is None else between)], [*other, *suffix]

    @property
    def second_segment(self) -> bool:
        """Whether the second of two texts that are read together has the second token type."""
        return self._parts.second_segment

    @property
    def bos_text(self) -> str:
        """The bos token as text, for templates; empty if there is none."""
        return "" if self._vocabulary.bos_id is None else self._vocabulary.tokens[self._vocabulary.bos_id]

    @property
    def eos_text(self) -> str:
        """The eos token as text."""
        return "" if self._vocabulary.eos_id is None else self._vocabulary.tokens[self._vocabulary.eos_id]

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template."""
        return self._parts.chat_template

    @property
    def rerank_template(self) -> str | None:
        """The model's own prompt for a query and a document."""
        return self._parts.rerank_template

    @property
    def fim(self) -> FimTokens | None:
        """The tokens for filling in the middle; None: the model was not trained for it."""
        return self._vocabulary.fim

    @property
    def drops_first_space(self) -> bool:
        """Whether decoding from the start of a text removes one leading space."""
        return self._encoder.drops_first_space

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of text, with bos and eos where the model wants them.

        parse_special lets control tokens written in text become control tokens; for text that may do so only.
        """
        ids = self.encode_marked(_checked(text), parse_special=parse_special)
        return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids] if add_special else ids

    def encode_marked(self, text: str, *, parse_special: bool, plain: Sequence[int] = ()) -> list[int]:
        """Return the ids of text, without bos and eos; no control token covers the characters at offsets plain."""
        ids: list[int] = []
        matcher = self.control_matcher if parse_special else self._user_matcher
        for segment in matcher.split(text, plain):
            if segment.token_id is not None:
                ids.append(segment.token_id)
            elif plain:  # user-defined tokens are found everywhere, marked or not
                ids += self._encode_unmarked(segment.text, at_start=not ids)
            else:
                ids += self._encoder.encode(segment.text, at_start=not ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Return the text of ids; at_start=False: they continue a text, so a leading space is kept."""
        from kvarn.tokenizer.incremental import IncrementalDecoder

        decoder = IncrementalDecoder(self, skip_special=skip_special, at_start=at_start)
        return decoder.push_all(_checked_ids(ids)) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for; they need not be whole characters."""
        token_type = self._token_type(token_id)
        token = self._vocabulary.tokens[token_id]
        if token_type == TokenType.BYTE:
            return bytes([int(token[3:5], 16)])
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            return token_as_bytes(token)
        return self._encoder.piece_bytes(token)

    def token_piece(self, token_id: int) -> tuple[bytes, bool]:
        """token_bytes() and is_control(), remembered for those that were asked for."""
        piece = self._piece_cache.get(token_id)
        if piece is None:
            piece = self._piece_cache[token_id] = self.token_bytes(token_id), self.is_control(token_id)
        return piece

    def token_pieces(self, token_ids: Sequence[int]) -> list[tuple[bytes, bool]]:
        """token_piece() of each, at a third of its time where all were asked for before."""
        try:
            return list(map(self._piece_cache.__getitem__, token_ids))
        except KeyError:
            return list(map(self.token_piece, token_ids))

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it."""
        self._token_type(token_id)
        return self._vocabulary.tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether a token steers the model and is no part of the text."""
        return self._token_type(token_id) in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, written by the model's chat template."""
        from kvarn.tokenizer.chat.template import ChatRequest, encode_chat

        return encode_chat(self, ChatRequest.checked(messages, tools, add_generation_prompt, kwargs))

    def prepare_chat(self) -> None:
        """Start the process that renders templates, if there is a template; do not wait for it."""
        if self.chat_template is not None:
            from kvarn.tokenizer.chat.template_worker import shared_worker

            with suppress(OSError):  # then encode_chat will say so
                shared_worker().start()

    def close(self) -> None:
        """Release nothing: the template worker is shared by the process and ends with it."""

    @cached_property
    def control_matcher(self) -> SpecialMatcher:
        """Finds every special token; for text of templates."""
        return self._matcher(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)

    @cached_property
    def forbidden_matcher(self) -> SpecialMatcher:
        """Finds the tokens that text from users must not become."""
        return self._matcher(TokenType.CONTROL, TokenType.UNKNOWN)

    @cached_property
    def _user_matcher(self) -> SpecialMatcher:
        return self._matcher(TokenType.USER_DEFINED)

    def _matcher(self, *token_types: TokenType) -> SpecialMatcher:
        ids = {self._vocabulary.tokens[token_id]: token_id for token_id in self._vocabulary.of_type(*token_types)}
        return SpecialMatcher(ids, self._parts.rules)

    def _encode_unmarked(self, text: str, *, at_start: bool) -> list[int]:
        ids: list[int] = []
        for segment in self._user_matcher.split(text):
            if segment.token_id is not None:
                ids.append(segment.token_id)
            else:
                ids += self._encoder.encode(segment.text, at_start=at_start and not ids)
        return ids

    def _token_type(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._token_types):
            raise InvalidParameter(
                f"token id {short(token_id)} is not in the vocabulary of {self.vocab_size:,} tokens", field="tokens"
            )
        return self._token_types[token_id]


def _checked_ids(ids: object) -> list[int]:
    if not is_iterable(ids) or isinstance(ids, str):
        raise InvalidParameter(f"token ids are {short(ids)}; give a list of whole numbers", field="tokens")
    given = list(ids)
    for token_id in given if set(map(type, given)) - {int} else ():
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise InvalidParameter(f"a token id is {short(token_id)}; give a list of whole numbers", field="tokens")
    return given


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidParameter(f"text is a {type(text).__name__}; give a string", field="text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"text has a lone surrogate at character {error.start}; give valid Unicode", field="text"
            ) from error
    return text
