"""Turn a stream of tokens into a stream of text. Any split of the tokens gives the same text.

Tokens are bytes: a character may be spread over several, so up to three bytes are held back until it is complete.
Bytes that can never become a character turn into U+FFFD exactly as in decoding everything at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What the decoder needs of a tokenizer."""

    @property
    def drops_first_space(self) -> bool: ...

    def token_piece(self, token_id: int) -> tuple[bytes, bool]: ...

    def token_pieces(self, token_ids: Sequence[int]) -> list[tuple[bytes, bool]]: ...


class IncrementalDecoder:
    """Decodes one completion, token by token."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        skip_special: bool = True,
        at_start: bool = True,
        visible_ids: frozenset[int] = frozenset(),
    ) -> None:
        """at_start=False: the tokens continue a text, so the space before its first word stays.

        visible_ids: control tokens to write even when the others are skipped.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._visible_ids = visible_ids
        self._drop_space = at_start and tokenizer.drops_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        data = self._bytes(token_id)
        # Whole characters as they are, most of them, come at a third of the time.
        return data.decode() if data.isascii() and not self._utf8.buffer else self._utf8.decode(data)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same for many tokens at once."""
        if self._drop_space or self._visible_ids or not self._skip_special:
            return self._utf8.decode(b"".join(map(self._bytes, token_ids)))
        pieces = self._tokenizer.token_pieces(token_ids)
        return self._utf8.decode(b"".join([data for data, is_control in pieces if not is_control]))

    def flush(self) -> str:
        """Return what was held back, at the end of the completion."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        data, is_control = self._tokenizer.token_piece(token_id)
        if is_control and self._skip_special and token_id not in self._visible_ids:
            return b""
        if self._drop_space and data and not is_control:
            self._drop_space = False
            return data.removeprefix(b" ")
        return data
