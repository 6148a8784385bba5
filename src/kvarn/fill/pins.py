"""Pinned texts as the tokens that stand for them on a canvas. Knows no engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvarn.errors import InvalidParameter
from kvarn.fill.layout import literal_ids

if TYPE_CHECKING:
    from kvarn.diffusion import DiffusionParams
    from kvarn.tokenizer.tokenizer import Tokenizer

MAX_CHARACTERS_PER_TOKEN = 64  # of the context; longer texts are refused before they are encoded


def with_pinned_ids(params: DiffusionParams, tokenizer: Tokenizer, context: int) -> DiffusionParams:
    """The same parameters, every pinned text as tokens from its index on."""
    texts = {index: given for index, given in params.pinned.items() if isinstance(given, str)}
    if not texts:
        return params
    if (num_characters := sum(map(len, texts.values()))) > context * MAX_CHARACTERS_PER_TOKEN:
        raise InvalidParameter(
            f"the texts of pinned have {num_characters:,} characters, more than a context of {context:,} tokens holds; "
            "shorten them",
            field="pinned",
        )
    pinned = dict(params.pinned_ids)
    for start, text in sorted(texts.items()):
        ids = literal_ids(tokenizer, text)
        for index, token_id in enumerate(ids, start):
            if index in pinned:
                raise InvalidParameter(
                    f"the text at index {start:,} of pinned has {len(ids):,} tokens, and index {index:,} is pinned "
                    "too; move one of them",
                    field="pinned",
                )
            pinned[index] = token_id
    return replace(params, pinned=pinned)
