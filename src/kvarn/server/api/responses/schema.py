"""Body and answer of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator

from kvarn.server.api.openai.chat_schema import ToolName
from kvarn.server.api.openai.message_schema import MAX_PARTS
from kvarn.server.api.openai.sampling_schema import INT31, TopLogprobs
from kvarn.server.api.schema import Answer, Body, tagged
from kvarn.server.chat.output.tools import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS
from kvarn.server.chat.reasoning import Effort

MAX_ITEMS = 4096
MAX_METADATA = 256
MAX_INCLUDED = 16
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Name = Annotated[str, Field(min_length=1, max_length=256)]
AbsentType = Literal["web_search", "web_search_preview", "namespace"]


class ResponseTextPart(Body):
    """Text of a user (input_text) or of the model (output_text)."""

    INERT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text"]
    text: str


class ResponseRefusalPart(Body):
    """What the model said when it refused, at OpenAI; text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


SaidPart = Annotated[ResponseTextPart | ResponseRefusalPart, Field(discriminator="type")]
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
    content: str | Annotated[list[SaidPart], Field(max_length=MAX_PARTS)]


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


class ItemReference(Body):
    """An item of a response that is stored here, instead of the item itself."""

    type: Literal["item_reference"]
    id: Name


def _item_type(item: Any) -> str:
    """A message may leave its type out."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else "?"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    tagged(
        _item_type,
        "type",
        "'message', 'function_call', 'function_call_output', 'reasoning' or 'item_reference'",
    ),
]


class FunctionTool(Body):
    """A function the model may call."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})
    type: Literal["function"]
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AbsentTool(BaseModel):
    """A tool that OpenAI itself runs, or a group of tools: not offered to the model, which a header tells."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"additionalProperties": True})
    type: AbsentType

    @model_validator(mode="before")
    @classmethod
    def _of_this_type(cls, data: Any) -> Any:
        return {"type": data.get("type")} if isinstance(data, dict) else data


ResponseTool = Annotated[FunctionTool | AbsentTool, Field(discriminator="type")]


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

    HINTS: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    format: Annotated[PlainFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningConfig(Body):
    """How much to think; what the model thought is told in full, whatever summary is asked for."""

    INERT: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})
    effort: Effort | None = Field(None, description="Told to the chat template, if it reads such a level")


class ResponsesBody(Body):
    """What to answer, and how."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention", "stream_options"}
        | {"client_metadata", "max_tool_calls"}  # the latter counts built-in tools, of which there are none
    )
    HINTS: ClassVar[frozenset[str]] = frozenset({"context_management", "prompt_cache_options"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"conversation", "prompt", "moderation", "image", "access_programs"})
    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    previous_response_id: Name | None = Field(None, description="Of a stored one: its conversation comes first")
    instructions: str | None = Field(None, description="Not carried over from an earlier response")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    stream: bool | None = None
    store: bool | None = Field(None, description="Keep it, to be continued or read again; default: true")
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
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None


class DeletedResponse(Answer):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(Answer):
    """What the model read for a response: the items of the conversation before it."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
