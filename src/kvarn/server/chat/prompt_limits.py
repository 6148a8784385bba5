"""Length limits of prompts: a text that cannot fit is refused before all of it is tokenized.

Counting stops where the refusal is certain. It goes piece by piece and may cut words, so the limit is generous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvarn.errors import PromptTooLong
from kvarn.formats.strict_json import strings
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
    if sum(map(len, texts)) <= SHORT * llm.context or count_bounded(llm, texts, limit) <= limit:
        return
    if param is None:
        raise PromptTooLong(limit, llm.context, is_exact=False)
    raise InvalidField(
        f"{param} has more than {limit:,} tokens; the context allows {llm.context:,}; shorten it",
        param,
        "context_length_exceeded",
    )


def count_bounded(llm: LLM, texts: Iterable[str], limit: int) -> int:
    """Tokens of texts, about; counted until there are more than limit."""
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            num_tokens += max(len(llm.tokenizer.encode(piece, add_special=False)), len(piece) // MAX_CHARACTERS)
            if num_tokens > limit:
                return num_tokens
    return num_tokens


@contextmanager
def tools_at_fault(llm: LLM, messages: Sequence[object], tools: Sequence[object], *, room: int = 1) -> Iterator[None]:
    """A prompt that is too long because of its tools is told by their name."""
    try:
        yield
    except (PromptTooLong, InvalidField) as error:
        if not tools or getattr(error, "code", "context_length_exceeded") != "context_length_exceeded":
            raise
        counts = [count_bounded(llm, strings(list(one)), ROOM * room * llm.context) for one in (messages, tools)]
        if counts[0] >= counts[1]:
            raise
        raise _tools_too_long(llm, *counts) from None


def _tools_too_long(llm: LLM, num_messages: int, num_tools: int) -> InvalidField:
    return InvalidField(
        f"tools have about {num_tools:,} tokens and messages {num_messages:,}, the context allows {llm.context:,} "
        "together; give fewer or shorter tools, or set a larger context",
        "tools",
        "context_length_exceeded",
    )


def encode_bounded(llm: LLM, text: str, param: str) -> list[int]:
    """Token ids of a text that is not much too long for the model."""
    check_bounded(llm, [text], param)
    return llm.tokenizer.encode(text)
