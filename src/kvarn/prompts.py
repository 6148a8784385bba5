"""What callers pass as prompts, parameters and adapters, one or several, and what they see beside the answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from kvarn.adapters.pool import LoraChoice
from kvarn.checks import check_parameter, is_iterable, short
from kvarn.citations.types import Grounded
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.models.encoders.rerank_templates import filled, rerank_template
from kvarn.models.spec import Encoder, ModelSpec
from kvarn.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

TokenIds = Sequence[int]
Prompt = str | TokenIds
ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each
LoraOfEach = LoraChoice | Sequence[LoraChoice]
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
    given = list(texts) if is_iterable(texts) else None
    if given is not None and all(isinstance(text, str) for text in given):
        return given
    if given is None or not all(
        is_iterable(ids) and isinstance(ids, Sequence | np.ndarray) and len(ids) for ids in given
    ):
        raise InvalidParameter(
            f"texts is {short(texts)}; give a string, a list of strings, or lists of token ids", field="texts"
        )
    return [whole_numbers(ids) for ids in given]


def listed_pairs(pairs: object) -> list[tuple[str, str]]:
    """Pairs of texts as a list."""
    given: list[Any] = list(pairs) if is_iterable(pairs) and not isinstance(pairs, str) else [pairs]
    for pair in given:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise InvalidParameter(f"a pair is {short(pair)}; give a list of pairs of texts", field="pairs")
    return given


def pair_ids(tokenizer: Tokenizer, pair: tuple[str, str], spec: ModelSpec) -> list[int]:
    """Two texts as a cross-encoder reads them: [CLS] first [SEP] second [SEP], the second in its own segment."""
    if not isinstance(spec.generation, Encoder) or spec.generation.pooling == "last":
        return rerank_ids(tokenizer, pair, spec)
    first, second = tokenizer.encode_pair(*pair)
    shift = spec.vocab_size if spec.embedding.segments > 1 and tokenizer.second_segment else 0
    return [*first, *(token_id + shift for token_id in second)]


def rerank_ids(tokenizer: Tokenizer, pair: tuple[str, str], spec: ModelSpec) -> list[int]:
    """A query and a document in the prompt of a language model; their text becomes no control token."""
    template, known = tokenizer.rerank_template, rerank_template(spec)
    if template is None and known is not None:
        template = known.text
    if template is None:
        raise UnsupportedModel(f"{spec.name!r} scores texts, and nothing says how it reads a query and a document")
    text, plain = filled(template, *pair)
    return tokenizer.encode_marked(text, parse_special=True, plain=plain)


def is_single(given: str | list[Any]) -> bool:
    """A text, or a list of token ids; anything else is a list of prompts."""
    return isinstance(given, str) or isinstance(given[0], int | np.integer)


def params_of_each(params: ParamsOfEach, num_prompts: int) -> Sequence[SamplingParams | None]:
    """As many as there are prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple):
        require_params(params)
    for one in params:
        require_params(one)
    if len(params) != num_prompts:
        raise InvalidParameter(
            f"params are {len(params)} and prompts {num_prompts}; give one for each, or one for all", field="params"
        )
    return params


def require_params(params: object) -> None:
    """Refuse what is no SamplingParams; None stands for the default ones."""
    check_parameter.instance(
        "params",
        params,
        SamplingParams,
        "a kvarn.SamplingParams or None; generate takes a list of them, too: one for each prompt",
        optional=True,
    )


def require_messages(prompt: object) -> Sequence[Message]:
    """Messages as they are; anything else has no question to be looked up."""
    if not is_messages(prompt):
        raise InvalidParameter(f"prompt is {short(prompt)}; with retrieve, give messages", field="prompt")
    return prompt


def require_retriever(retrieve: object) -> None:
    """Refuse what cannot put sources into a conversation."""
    if not callable(getattr(retrieve, "ground", None)) or isinstance(retrieve, type):
        raise InvalidParameter(f"retrieve is {short(retrieve)}; give a kvarn.Collection", field="retrieve")


def is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def whole_numbers(ids: object) -> list[int]:
    """Token ids as plain integers; NumPy's count as such, bools and floats do not."""
    numbers: list[int] = []
    items = _items(ids)
    if list(map(type, items)).count(int) == len(items):
        return items
    for token_id in items:
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise InvalidParameter(f"a token id is {short(token_id)}; give whole numbers", field="prompt")
        numbers.append(int(token_id))
    return numbers


def _items(prompt: object) -> list[Any]:
    if not is_iterable(prompt):
        raise InvalidParameter(
            f"the prompt is {short(prompt)}; give a string, token ids, or a list of them", field="prompt"
        )
    return list(prompt)


def loras_of_each(lora: LoraOfEach, num_prompts: int) -> Sequence[LoraChoice]:
    """As many as there are prompts."""
    if not isinstance(lora, list | tuple):
        return [cast(LoraChoice, lora)] * num_prompts
    if len(lora) != num_prompts:
        raise InvalidParameter(
            f"lora has {len(lora)} entries and prompts {num_prompts}; give one for each, or one for all",
            field="lora",
        )
    return lora


def with_constraint(params: SamplingParams, grounded: Grounded, spec: ModelSpec) -> SamplingParams:
    """Parameters of an answer that has the form retrieval asks for, unless something else that was asked forbids it."""
    is_free = params.constraint is None and not (params.ignore_eos or params.prefill_only or spec.is_diffusion)
    return params.replace(constraint=grounded.constraint) if grounded.constraint is not None and is_free else params


def cited(completion: Completion, grounded: Grounded) -> Completion:
    """The completion with its sources, each choice with those that support it."""
    if not grounded.citations:
        return completion
    sentences = grounded.attributed(completion.text)
    others = tuple(cited(one, grounded) for one in completion.alternatives)
    return replace(completion, citations=grounded.cited(sentences), sentences=sentences, alternatives=others)


def show_progress(answers: Sequence[Future[Completion]]) -> None:
    """Draw a bar on stderr until every answer is there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(answers))
        for _ in as_completed(answers):
            bar.advance(task)
