"""The interface of all encoders of plain text, and how failures of the tokenizers package become our errors.

Plain means: control tokens are never looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kvarn.cancellation import require_wanted
from kvarn.errors import FormatError, InvalidParameter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG_CHARACTERS = 8192


class TextEncoder(Protocol):
    """Plain text to ids, and a token's text to the bytes it stands for."""

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of a non-empty text; at_start: nothing precedes it."""

    def piece_bytes(self, token: str) -> bytes:
        """Return what a normal token adds to the output."""

    @property
    def drops_first_space(self) -> bool:
        """Whether decoding removes one space at the very start, because encoding put it there."""


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, by the tokenizers package."""
    require_wanted()
    try:
        if len(text) < LONG_CHARACTERS:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        # encode() holds the GIL all the time, which blocks every other thread for seconds.
        batch: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return batch
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a pattern that gives up makes the package panic
        raise InvalidParameter(
            f"the model's tokenizer cannot encode this text: {str(error)[:120]}; write it in another way", field="text"
        ) from error


@contextmanager
def vocabulary_errors() -> Iterator[None]:
    """Turn whatever the tokenizers package raises on a bad vocabulary, panics included, into FormatError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # pyo3's PanicException derives from BaseException
        raise FormatError(f"the vocabulary cannot be used: {str(error)[:200]}; get the model file again") from error
