"""Bodies and answers of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvarn.server.api.openai.chat_schema import MAX_MESSAGES, ToolName
from kvarn.server.api.openai.sampling_schema import INT31, StopString
from kvarn.server.api.schema import BYTES_PER_TOKEN, COUNTED_BYTES_PER_TOKEN, Answer, Body
from kvarn.server.chat.output.tools import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS
from kvarn.server.chat.reasoning import Effort
from kvarn.types import MAX_STOP_STRINGS

MAX_BLOCKS = 4096


class TextBlock(Body):
    """Text that the model reads."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "parsed_output"})
    type: Literal["text"]
    text: str
    citations: None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]


class ThinkingBlock(Body):
    """What the model thought in an earlier turn; its template decides whether it reads it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    """A call the model made in an earlier turn."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"toolset_name"})
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a called tool returned."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"toolset_name"})
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: str | TextBlocks = ""
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=MAX_BLOCKS)]


class MessageTool(Body):
    """A tool the model may call."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})
    HINTS: ClassVar[frozenset[str]] = frozenset({"defer_loading", "input_examples"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"allowed_callers"})
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnyToolChoice(Body):
    """The model decides (auto), must call some tool (any), or must not call one (none)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class ThinkingOn(Body):
    """Think first; the model decides how long, and max_tokens bounds both."""

    INERT: ClassVar[frozenset[str]] = frozenset({"budget_tokens"})
    HINTS: ClassVar[frozenset[str]] = frozenset({"display"})
    type: Literal["enabled", "adaptive"]


class ThinkingOff(Body):
    """Answer at once."""

    type: Literal["disabled"]


class OutputSchema(Body):
    """The answer is JSON that validates against a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is written."""

    effort: Effort | None = Field(None, description="Told to the chat template, if it reads such a level")
    format: OutputSchema | None = None


class CountTokensBody(Body):
    """A conversation whose tokens are counted."""

    BYTES_PER_TOKEN: ClassVar[int] = COUNTED_BYTES_PER_TOKEN
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    HINTS: ClassVar[frozenset[str]] = frozenset({"context_management", "speed"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"mcp_servers", "compaction", "thread", "fallbacks"})
    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """A conversation to be continued."""

    BYTES_PER_TOKEN: ClassVar[int] = BYTES_PER_TOKEN
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "metadata", "service_tier"})
    HINTS: ClassVar[frozenset[str]] = CountTokensBody.HINTS | {"diagnostics"}
    REFUSED: ClassVar[frozenset[str]] = CountTokensBody.REFUSED | {
        "container",
        "inference_geo",
        "fallback_credit_token",
    }
    max_tokens: int = Field(ge=1, le=INT31, description="Lowered to what the context leaves, which a header tells")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=INT31)


class TextAnswer(Answer):
    """Text the model wrote."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingAnswer(Answer):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseAnswer(Answer):
    """A call the model wants made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Tokens read and written; those found in the prefix cache are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageAnswer(Answer):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[TextAnswer | ThinkingAnswer | ToolUseAnswer, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """How many tokens the conversation has, template and tools included."""

    input_tokens: int
