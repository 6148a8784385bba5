"""Body and answer of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from kvarn.server.api.openai.message_schema import ChatMessage, Content
from kvarn.server.api.openai.sampling_schema import INT31, SamplingBody, TopLogprobs, UsageAnswer
from kvarn.server.api.schema import Answer, Body
from kvarn.server.chat.output.tools import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS, TOOL_NAME
from kvarn.server.chat.reasoning import Effort
from kvarn.server.collections.schema import RetrievalBody

MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 64
MAX_SCHEMA_NAME = 64
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)]
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]


def _require_false(value: bool) -> bool:
    if value:
        raise ValueError("nothing is stored here; give false or leave it out")
    return value


Never = Annotated[bool, AfterValidator(_require_false), WithJsonSchema({"const": False})]


class FunctionDefinition(Body):
    """A function the model may call."""

    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Functions are the only tools."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The model must call this one."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(Body):
    """A schema the answer validates against."""

    INERT: ClassVar[frozenset[str]] = frozenset({"description"})
    name: str = Field(min_length=1, max_length=MAX_SCHEMA_NAME)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON that validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class PredictionBody(Body):
    """What the answer is expected to be, as when a text is edited."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    """A conversation, and how to go on with it."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )
    HINTS: ClassVar[frozenset[str]] = frozenset({"verbosity", "prompt_cache_options"})
    REFUSED: ClassVar[frozenset[str]] = frozenset(
        {"audio", "web_search_options", "functions", "function_call", "chat_template", "best_of", "suffix", "echo"}
        | {"moderation"}
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=INT31)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT31)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Effort | None = Field(None, description="Told to the chat template, if it reads such a level")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    store: Never | None = None
    retrieval: RetrievalBody | None = None
    prediction: PredictionBody | None = Field(None, description="It comes faster where it comes so, never different")


class ChatTopLogprob(Answer):
    """A token and its log-probability; bytes are the token's own, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob):
    """One token of the answer, the one that ended it included."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Answer):
    """One entry for each token of the answer."""

    content: list[ChatLogprob]


class ChatFunction(Answer):
    """A function the model wants to be called."""

    name: str
    arguments: str


class ChatToolCall(Answer):
    """A call, to be answered by a message with role tool and this id."""

    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatAnswerMessage(Answer):
    """What the model said, apart from what it thought and what it calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


FinishReasonAnswer = Literal["stop", "length", "tool_calls", "cancelled"]


class ChatChoice(Answer):
    """One of the n answers."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonAnswer


class ChatAnswer(Answer):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    system_fingerprint: str
    prompt_logprobs: list[ChatLogprob | None] | None = None
