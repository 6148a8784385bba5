"""Body and answer of /v1/responses, without the parts that need a memory of earlier responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvarn.server.api.openai.chat_schema import MAX_PARTS, MAX_TOOLS
from kvarn.server.api.openai.sampling_schema import INT31, TopLogprobs
from kvarn.server.api.schema import Answer, Body

MAX_ITEMS = 4096
MAX_METADATA = 256
MAX_INCLUDED = 16
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class ResponseTextPart(Body):
    """Text of a user (input_text) or of the model (output_text)."""

    INERT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text"]
    text: str


ResponseTextParts = Annotated[list[ResponseTextPart], Field(max_length=MAX_PARTS)]


class ReasoningPart(Body):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Body):
    """Somebody said something; what the model said in an earlier response may be sent back as it came."""

    INERT: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ResponseTextParts


class FunctionCallItem(Body):
    """A call the model made in an earlier response."""

    INERT: ClassVar[frozenset[str]] = frozenset({"id", "status", "caller", "parsed_arguments"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"async", "namespace"})
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class FunctionOutputItem(Body):
    """What a called function returned."""

    INERT: ClassVar[frozenset[str]] = frozenset({"id", "status", "caller", "name"})
    type: Literal["function_call_output"]
    call_id: Name
    output: str | ResponseTextParts


class ReasoningItem(Body):
    """What the model thought in an earlier response."""

    INERT: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary"})
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None


def _item_type(item: Any) -> str:
    """A message may leave its type out."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else "?"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FunctionTool(Body):
    """A function the model may call."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})
    type: Literal["function"]
    name: ToolName
    description: str | None = Field(None, max_length=16_384)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The model must call this function."""

    type: Literal["function"]
    name: str


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class ResponseSchemaFormat(Body):
    """JSON that validates against a schema."""

    INERT: ClassVar[frozenset[str]] = frozenset({"description"})
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the text is written."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    format: Annotated[PlainFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(Body):
    """What to answer, and how. The server keeps nothing: send the whole conversation each time."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention", "stream_options"}
        | {"max_tool_calls"}  # counts built-in tools, of which there are none
    )
    REFUSED: ClassVar[frozenset[str]] = frozenset(
        {"previous_response_id", "conversation", "prompt", "reasoning", "context_management", "moderation", "image"}
        | {"prompt_cache_options", "access_programs"}
    )
    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    stream: bool | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None


class ResponsesUsage(Answer):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(Answer):
    """The whole response. Items of output have the types message, function_call and reasoning."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    temperature: float | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    max_output_tokens: int | None
    top_logprobs: int
    text: dict[str, Any]
    background: Literal[False]
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
