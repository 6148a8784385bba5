"""What callers pass as a prompt: a text, token ids, messages, or a list of the first two. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np

from kvarn.errors import InvalidParameter
from kvarn.types import Message

TokenIds = Sequence[int]
Prompt = str | TokenIds
Prompts = list[str] | list[list[int]] | list[tuple[int, ...]]


def is_single(prompt: object) -> bool:
    """A text, or a list of token ids; anything else is a list of prompts."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Iterable):
        raise InvalidParameter(f"the prompt is {prompt!r:.60}; give a string, token ids, or a list of them")
    first = next(iter(prompt), None)
    if first is None:
        raise InvalidParameter("the prompt is an empty list; give at least one prompt or token")
    return isinstance(first, int | np.integer)


def is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def whole_numbers(ids: object) -> list[int]:
    """Token ids as plain integers; NumPy's count as such, bools and floats do not."""
    if not isinstance(ids, Iterable) or isinstance(ids, bytes | dict):
        raise InvalidParameter(f"the prompt is {ids!r:.60}; give a string, token ids, or a list of them")
    numbers = []
    for token_id in ids:
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise InvalidParameter(f"a token id is {token_id!r:.60}; give whole numbers")
        numbers.append(int(token_id))
    return numbers
