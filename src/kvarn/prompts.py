"""What callers pass as a prompt: a text, token ids, messages, or a list of the first two. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from kvarn.errors import InvalidParameter
from kvarn.models.spec import ModelSpec
from kvarn.types import Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

TokenIds = Sequence[int]
Prompt = str | TokenIds
ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each
Prompts = list[str] | list[list[int]] | list[tuple[int, ...]]


def listed(prompt: object) -> str | list[Any]:
    """A text as it is; anything else as a list that is not empty, so that an iterator is read once."""
    if isinstance(prompt, str):
        return prompt
    items = _items(prompt)
    if not items:
        raise InvalidParameter("the prompt is an empty list; give at least one prompt or token", field="prompt")
    return items


def listed_inputs(texts: object) -> list[str] | list[list[int]]:
    """One text or several, or lists of token ids none of which is empty, as a list."""
    if isinstance(texts, str):
        return [texts]
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, bytes | Mapping | Set) else None
    if given is not None and all(isinstance(text, str) for text in given):
        return given
    if given is None or not all(isinstance(ids, Sequence | np.ndarray) and len(ids) for ids in given):
        raise InvalidParameter(
            f"texts is {texts!r:.60}; give a string, a list of strings, or lists of token ids", field="texts"
        )
    return [whole_numbers(ids) for ids in given]


def pair_ids(tokenizer: Tokenizer, pair: tuple[str, str], spec: ModelSpec) -> list[int]:
    """Two texts as a cross-encoder reads them: [CLS] first [SEP] second [SEP], the second in its own segment."""
    first = tokenizer.encode(pair[0])
    second = tokenizer.encode(pair[1])[len(tokenizer.prefix_ids) :]
    shift = spec.vocab_size if spec.embedding.segments > 1 else 0
    return [*first, *(token_id + shift for token_id in second)]


def is_single(given: str | list[Any]) -> bool:
    """A text, or a list of token ids; anything else is a list of prompts."""
    return isinstance(given, str) or isinstance(given[0], int | np.integer)


def params_of_each(params: ParamsOfEach, num_prompts: int) -> Sequence[SamplingParams | None]:
    """As many as there are prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    given = list(params)
    if len(given) != num_prompts:
        raise InvalidParameter(
            f"params are {len(given)} and prompts {num_prompts}; give one for each, or one for all", field="params"
        )
    return given


def is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def whole_numbers(ids: object) -> list[int]:
    """Token ids as plain integers; NumPy's count as such, bools and floats do not."""
    numbers: list[int] = []
    items = _items(ids)
    if set(map(type, items)) <= {int}:
        return items
    for token_id in items:
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise InvalidParameter(f"a token id is {token_id!r:.60}; give whole numbers", field="prompt")
        numbers.append(int(token_id))
    return numbers


def _items(prompt: object) -> list[Any]:
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping | Set):
        raise InvalidParameter(
            f"the prompt is {prompt!r:.60}; give a string, token ids, or a list of them", field="prompt"
        )
    return list(prompt)
