"""Encode a client's text for routes that do not generate; what cannot fit is refused before it costs time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarn.server.schema.common import InvalidField

if TYPE_CHECKING:
    from kvarn.llm import LLM

MAX_TOKEN_CHARACTERS = 128  # more than any token of the usual vocabularies; an encoder's unknown word has at most 100


def check_bounded(llm: LLM, text: str, param: str) -> None:
    """Refuse a text that is hopelessly long for the model."""
    limit = llm.context * MAX_TOKEN_CHARACTERS
    if len(text) > limit:
        raise InvalidField(
            f"{param} has {len(text):,} characters, the model's context of {llm.context:,} tokens holds at most "
            f"{limit:,}; shorten it",
            param,
            "context_length_exceeded",
        )


def encode_bounded(llm: LLM, text: str, param: str, *, add_special: bool = True) -> list[int]:
    """Token ids of a text that is not hopelessly long for the model."""
    check_bounded(llm, text, param)
    return llm.tokenizer.encode(text, add_special=add_special)
