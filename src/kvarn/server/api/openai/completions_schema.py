"""Body and answer of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kvarn.server.api.openai.chat_schema import ChatLogprob
from kvarn.server.api.openai.sampling_schema import INT31, SamplingBody, TopLogprobs, UsageAnswer
from kvarn.server.api.schema import MAX_TOKEN_VALUES, MAX_VALUES, Answer
from kvarn.server.api.text_inputs import Texts, listed_texts, texts_schema

MAX_PROMPTS = MAX_VALUES  # how many of them are taken is the queue's to say


def _listed(given: Any) -> Texts:
    return listed_texts(given, MAX_PROMPTS)


class CompletionBody(SamplingBody):
    """Texts to continue. Without max_tokens an answer has at most 16 tokens, as at OpenAI."""

    MAX_VALUES: ClassVar[int] = MAX_TOKEN_VALUES
    INERT: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})
    HINTS: ClassVar[frozenset[str]] = frozenset({"reasoning_effort"})  # no chat template is read here
    REFUSED: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "response_format"})
    prompt: Annotated[Any, PlainValidator(_listed), WithJsonSchema(texts_schema(MAX_PROMPTS))]  # Texts
    suffix: str | None = Field(
        None, description="What follows the answer; for diffusion models, and those that fill in the middle"
    )
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
