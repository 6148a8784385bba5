"""Bodies and answers of /tokenize, /detokenize, /apply-template and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvarn.server.api.openai.chat_schema import MAX_MESSAGES, TemplateKwargs, Tool
from kvarn.server.api.openai.message_schema import ChatMessage
from kvarn.server.api.openai.sampling_schema import TokenId
from kvarn.server.api.schema import COUNTED_BYTES_PER_TOKEN, MAX_TOKEN_IDS, MAX_TOKEN_VALUES, Answer, Body
from kvarn.server.chat.output.tools import MAX_TOOLS

_TEMPLATES: frozenset[str] = frozenset({"chat_template"})  # a template from a request is never run


class ChatTextBody(Body):
    """A conversation to be written by the model's chat template."""

    BYTES_PER_TOKEN: ClassVar[int] = COUNTED_BYTES_PER_TOKEN
    REFUSED: ClassVar[frozenset[str]] = _TEMPLATES
    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateKwargs | None = None


class TokenizeBody(Body):
    """A text or a conversation to be cut into tokens."""

    BYTES_PER_TOKEN: ClassVar[int] = COUNTED_BYTES_PER_TOKEN
    REFUSED: ClassVar[frozenset[str]] = _TEMPLATES
    model: str | None = None
    prompt: str | None = Field(None, description="A text; bos or eos alone, without special tokens, is that token")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Tokens to be turned into text."""

    BYTES_PER_TOKEN: ClassVar[int] = COUNTED_BYTES_PER_TOKEN
    MAX_VALUES: ClassVar[int] = MAX_TOKEN_VALUES
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]
    skip_special_tokens: bool = False


class TokenizeAnswer(Answer):
    """The tokens, and how many of them the model's context holds."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer):
    """The text of the tokens."""

    prompt: str


class ChatTextAnswer(Answer):
    """What the template wrote."""

    prompt: str


class TokenizerInfo(Answer):
    """A model's tokenizer, as clients need it that cut texts into tokens by /tokenize."""

    tokenizer_class: Literal["kvarn"]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    vocab_size: int
    model_max_length: int
    chat_template: str | None
