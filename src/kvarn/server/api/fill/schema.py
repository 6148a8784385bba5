"""Body and answer of /v1/fill: a template or a JSON schema, filled in at once by a diffusion model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from kvarn.fill.template import MAX_SLOT_TOKENS, MAX_SLOTS, MAX_TEMPLATE_CHARACTERS, SLOT_NAME
from kvarn.server.api.diffusion_schema import DiffusionBody
from kvarn.server.api.openai.sampling_schema import INT31, UsageAnswer
from kvarn.server.api.schema import Answer, Body
from kvarn.types import MAX_PRIORITY

SlotName = Annotated[str, StringConstraints(pattern=rf"^{SLOT_NAME}$")]
Choice = Annotated[str, Field(min_length=1, max_length=1024)]


class SlotBody(Body):
    """What may stand in one slot: any text, or what one of regex, choices and json_schema allows."""

    max_tokens: int | None = Field(None, ge=1, le=MAX_SLOT_TOKENS, description="Room; a shorter text is trimmed")
    regex: str | None = Field(None, min_length=1, description="The whole text of the slot")
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1024)] | None = None
    json_schema: dict[str, Any] | None = None


class FillBody(Body):
    """A template with slots written as {{name}}, or a JSON schema, of which every value is a slot."""

    model: str = Field(description="An id of /v1/models, of a diffusion model")
    template: str | None = Field(None, min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)
    json_schema: dict[str, Any] | None = None
    slots: Annotated[dict[SlotName, SlotBody], Field(max_length=MAX_SLOTS)] | None = Field(
        None, description="Those of the template that take not just any text"
    )
    prompt: str = Field("", description="What stands before the template")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy, the default")
    top_k: int | None = Field(None, ge=0, le=INT31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Clamped to what the key may")
    diffusion: DiffusionBody | None = None


class FillAnswer(Answer):
    """The filled template."""

    id: str
    object: Literal["fill"]
    created: int
    model: str
    text: str
    values: dict[str, str]  # by slot; of a JSON schema by the path of the value
    usage: UsageAnswer
