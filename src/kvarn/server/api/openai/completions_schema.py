"""Body and answer of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kvarn.server.api.openai.chat_schema import ChatLogprob
from kvarn.server.api.openai.sampling_schema import INT31, SamplingBody, TopLogprobs, UsageAnswer
from kvarn.server.api.schema import MAX_TOKEN_IDS, MAX_TOKEN_VALUES, MAX_VALUES, Answer, check_token_ids

Prompts = list[str] | list[list[int]]


def _listed(given: Any) -> Prompts:
    """Texts or lists of token ids; a single one becomes a list. How many are taken is the queue's to say."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("give a text, token ids, or a list of them that is not empty")
    if _is_id(given[0]):
        given = [given]
    if len(given) > MAX_VALUES:
        raise ValueError(f"{len(given):,} prompts are too many; send no more than the queue takes")
    if not all(isinstance(one, type(given[0])) for one in given) or not isinstance(given[0], str | list):
        raise ValueError("give texts only, or lists of token ids only")
    if isinstance(given[0], list):
        check_token_ids(given)
    for one in given:
        if not one:
            raise ValueError("a prompt is empty; give at least one character or token")
        if isinstance(one, list) and not all(_is_id(token_id) and 0 <= token_id <= INT31 for token_id in one):
            raise ValueError("token ids are whole numbers from 0 to the size of the vocabulary")
    prompts: Prompts = given
    return prompts


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TEXT = {"type": "string", "minLength": 1}
_ID = {"type": "integer", "minimum": 0, "maximum": INT31}
_IDS = {"type": "array", "items": _ID, "minItems": 1, "maxItems": MAX_TOKEN_IDS}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_VALUES},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_VALUES},
    ]
}


class CompletionBody(SamplingBody):
    """Texts to continue. Without max_tokens an answer has at most 16 tokens, as at OpenAI."""

    MAX_VALUES: ClassVar[int] = MAX_TOKEN_VALUES
    INERT: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})
    HINTS: ClassVar[frozenset[str]] = frozenset({"reasoning_effort"})  # no chat template is read here
    REFUSED: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "response_format"})
    prompt: Annotated[Any, PlainValidator(_listed), WithJsonSchema(_PROMPT_SCHEMA)]  # Prompts
    suffix: str | None = Field(None, description="What follows the answer; for models that fill in the middle")
    parse_special: bool | None = Field(
        None, description="Control tokens written in the prompt are control tokens, not text; default false"
    )
    max_tokens: int | None = Field(None, ge=0, le=INT31, description="0 with echo only: nothing is generated")
    echo: bool | None = Field(None, description="The prompt stands before the answer")
    logprobs: TopLogprobs | None = None
    best_of: int | None = Field(None, ge=1, le=1, description="More are not supported; use n")


class LegacyLogprobs(Answer):
    """Lists of the same length: one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One answer; index counts through all prompts and their n answers."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length", "cancelled"]
    prompt_logprobs: list[ChatLogprob | None] | None = None


class CompletionAnswer(Answer):
    """All answers."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    system_fingerprint: str
