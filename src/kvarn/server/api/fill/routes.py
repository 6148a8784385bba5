"""POST /v1/fill: the slots of a template, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.diffusion import DiffusionParams
from kvarn.errors import InvalidParameter
from kvarn.fill import Slot, template_parts
from kvarn.server.api.fill.schema import FillAnswer, FillBody
from kvarn.server.api.openai.envelope import Envelope, usage_fields
from kvarn.server.api.schema import InvalidField, body_of, field_at_fault
from kvarn.server.chat.generation_plan import RequestOptions
from kvarn.server.chat.prompt_limits import check_bounded
from kvarn.server.dependencies import Charged, Models, RunningGenerations
from kvarn.types import SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.fill.layout import CanvasLayout
    from kvarn.fill.template import Parts
    from kvarn.server.models.served_model import ServedModel

router = APIRouter(tags=["fill"])
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed")
_OF_STREAMS = ("pinned", "events")


@router.post("/v1/fill", response_model=FillAnswer, openapi_extra=body_of(FillBody))
async def fill(request: Charged, models: Models, generations: RunningGenerations) -> Response:
    """Fill the slots of a template, or the values of a JSON schema; for diffusion models."""
    body = await request.body(FillBody)
    parts, params = await request.on_body(lambda: (_parts(body), _params(body)))
    model = await request.use_model(models, body.model)
    template = _Template(model, body, parts, params)
    options = RequestOptions(priority=body.priority)
    generation = await generations.begin(request, model, [template.submission], options)
    (completion,) = await generation.finish()
    assert template.layout is not None
    filled = template.layout.filled(model.llm.llm.tokenizer, completion)
    envelope = Envelope.of(generation, "fill-", "fill").fields()
    return request.reply(
        {**envelope, "text": filled.text, "values": filled.values, "usage": usage_fields(completion.usage)}
    )


class _Template:
    """One template on its way to the engine: made in a worker thread, read when it is filled."""

    def __init__(self, model: ServedModel, body: FillBody, parts: Parts, params: SamplingParams) -> None:
        self.layout: CanvasLayout | None = None
        self._llm = model.llm.llm
        self._body = body
        self._parts = parts
        self._params = params

    def submission(self) -> Submission:
        llm, body = self._llm, self._body
        source = "json_schema" if body.template is None else "template"
        check_bounded(llm, [body.prompt], None)
        check_bounded(llm, [part for part in self._parts if isinstance(part, str)], source)
        ids = llm.tokenizer.encode(body.prompt)
        with field_at_fault("json_schema" if body.template is None else "slots"):
            submission, self.layout = llm.submissions.of_fill(ids, self._parts, self._params, llm.context)
        return submission


def _parts(body: FillBody) -> Parts:
    if (body.template is None) == (body.json_schema is None):
        raise InvalidField("give either template or json_schema", "template", mentions=())
    if body.json_schema is not None:
        with field_at_fault("json_schema"):
            return template_parts(body.json_schema, {name: Slot() for name in body.slots or ()})
    assert body.template is not None
    slots = {}
    for name, slot in (body.slots or {}).items():
        try:
            slots[name] = Slot(slot.max_tokens, slot.regex, tuple(slot.choices or ()), slot.json_schema)
        except InvalidParameter as error:
            raise InvalidField(f"slots.{name}: {error}", f"slots.{name}") from None
    return template_parts(body.template, slots)


def _params(body: FillBody) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.diffusion is None:
        return SamplingParams(**given)
    for name in _OF_STREAMS:
        if getattr(body.diffusion, name):
            raise InvalidField(f"diffusion.{name} has no meaning for a template; leave it out", f"diffusion.{name}")
    try:
        diffusion: DiffusionParams = body.diffusion.params()
    except InvalidParameter as error:
        raise InvalidField(f"diffusion: {error}", "diffusion") from None
    return SamplingParams(**given, diffusion=diffusion)
