"""The messages of /v1/chat/completions: what was said, called and returned so far."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, Tag, model_serializer

from kvarn.server.api.schema import Body, tagged
from kvarn.server.chat.output.tools import MAX_TOOLS

MAX_PARTS = 4096  # of one message


class TextPart(Body):
    """Text; other kinds of parts are not read here."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint"})
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Speaker = Annotated[
    str | None, Field(description="Told to the chat template; without effect on models whose template does not read it")
]


class CalledFunction(Body):
    """A function and its arguments, as JSON in a string."""

    INERT: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})  # the client's own, beside arguments
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallPart(Body):
    """A call the model made earlier."""

    INERT: ClassVar[frozenset[str]] = frozenset({"index"})  # its place in a stream
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class InstructionMessage(Body):
    """What the operator wants."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    role: Literal["system", "developer"]
    content: Content
    name: Speaker = None


class UserMessage(Body):
    """What the user says."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    role: Literal["user"]
    content: Content
    name: Speaker = None


class RefusalPart(Body):
    """What the model said when it refused, at OpenAI; here it is text of the message like any other."""

    type: Literal["refusal"]
    refusal: str

    @model_serializer
    def _as_text(self) -> dict[str, str]:
        return {"type": "text", "text": self.refusal}


SaidPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class AssistantMessage(Body):
    """What the model said; nothing is the same as an empty text."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "annotations", "parsed"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"audio", "function_call"})
    role: Literal["assistant"]
    content: str | Annotated[list[SaidPart], Field(max_length=MAX_PARTS)] | None = None
    refusal: str | None = Field(None, description="Read as content where there is none")
    name: Speaker = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallPart], Field(max_length=MAX_TOOLS)] | None = None

    @model_serializer(mode="wrap")
    def _with_refusal(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        refusal = fields.pop("refusal", None)
        return fields if refusal is None or self.content else {**fields, "content": refusal}


class ToolMessage(Body):
    """What a called function returned."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1, max_length=256)
    name: Speaker = None


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    role = "system" if role == "developer" else role
    return role if isinstance(role, str) else "?"


ChatMessage = Annotated[
    Annotated[InstructionMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    tagged(_role, "role", "'system', 'developer', 'user', 'assistant' or 'tool'"),
]
