"""Length limits of prompts: a text that cannot fit is refused before all of it is tokenized.

Counting stops where the refusal is certain. It goes piece by piece and may cut words, so the limit is generous.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvarn.errors import PromptTooLong
from kvarn.server.api.schema import InvalidField

if TYPE_CHECKING:
    from kvarn.llm import LLM

PIECE_CHARACTERS = 16384
SHORT = 8  # characters for each token of the context: encoded at once, twice what prose of the context's length has
MAX_CHARACTERS = 64  # of a token, on average: a word of megabytes is a single token to some models, and takes seconds
ROOM = 2  # contexts: a text of more tokens is refused without being encoded to its end


def check_bounded(llm: LLM, texts: Collection[str], param: str | None, *, room: int = ROOM) -> None:
    """Refuse texts that together have more tokens than room times the context; param: None for the prompt."""
    limit = room * llm.context
    if sum(map(len, texts)) <= SHORT * llm.context:
        return
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            num_tokens += max(len(llm.tokenizer.encode(piece, add_special=False)), len(piece) // MAX_CHARACTERS)
            if num_tokens > limit and param is None:
                raise PromptTooLong(limit, llm.context, is_exact=False)
            if num_tokens > limit:
                raise InvalidField(
                    f"{param} has more than {limit:,} tokens; the context allows {llm.context:,}; shorten it",
                    param,
                    "context_length_exceeded",
                )


def encode_bounded(llm: LLM, text: str, param: str) -> list[int]:
    """Token ids of a text that is not much too long for the model."""
    check_bounded(llm, [text], param)
    return llm.tokenizer.encode(text)
