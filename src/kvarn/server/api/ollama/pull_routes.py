"""POST /api/pull: what is here is there at once; for admins, what is not is fetched and offered from then on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.server.api.ollama.errors import PREFIX
from kvarn.server.api.ollama.schema import OllamaPullBody
from kvarn.server.api.ollama.translation import model_id, source_name
from kvarn.server.api.ollama.writer import NDJSON, line_bytes, line_format
from kvarn.server.api.schema import Answer, body_of
from kvarn.server.dependencies import Called, ModelPulls, Models, ServerLifecycle, Settings
from kvarn.server.http.sse import EventStreamResponse
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.pull_progress import progress, told, told_to_admins
from kvarn.server.models.pulls import Pull, remote_name
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["ollama"])
SUCCESS = {"status": "success"}
WORDS = {"looking": "pulling manifest", "waiting": "waiting for another pull", "unpacking": "unpacking"}
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}}


@router.post(f"{PREFIX}pull", response_model=Answer, responses=LINES, openapi_extra=body_of(OllamaPullBody))
async def pull(
    *, request: Called, models: Models, pulls: ModelPulls, lifecycle: ServerLifecycle, settings: Settings
) -> Response:
    """Say that a model is here; for keys with admin = true, fetch one that is not, telling how far it is."""
    body = await request.body(OllamaPullBody)
    given = body.wanted
    if model_id(given, models.ids) in models.ids:
        return request.reply(SUCCESS) if body.stream is False else _lines(request, SUCCESS)
    request.require_admin(f"this server has no model {given!r:.80}, and models are pulled")
    name = remote_name(source_name(given))
    with told_to_admins():
        begun = pulls.begin(name, models.budget_bytes, force=False)
        await request.while_awaited(begun.planned.wait())
        told(begun)  # before the first byte: a status of its own, as for any other request
        if body.stream is False:
            await request.while_awaited(begun.ended.wait())
            told(begun)
            await _offer(models, given, str(name))
            return request.reply(SUCCESS)
    lines = _progress_lines(request, begun, lifecycle, models, given)
    format = line_format(lambda: line_bytes({"status": "pulling"}))
    return EventStreamResponse(request, lines, format, comment=lambda: "pulling", ping_s=settings.ping_s)


async def _offer(models: ModelPool, given: str, name: str) -> None:
    """From now on it is a model of this server, by the name that was asked for; it is loaded when it is used."""
    models.offer(await models.prospect(model_id(given, ()), name))


async def _progress_lines(
    request: RequestContext, pull: Pull, lifecycle: Lifecycle, models: ModelPool, given: str
) -> AsyncIterator[bytes]:
    async for fields in progress(request, pull, lifecycle):
        if fields["status"] == "success":
            with told_to_admins():
                await _offer(models, given, str(pull.name))
            yield line_bytes(SUCCESS)
        else:
            yield line_bytes(_line(fields))


def _line(fields: dict[str, Any]) -> dict[str, Any]:
    """One line; completed and total are bytes, and clients show a bar for each digest."""
    status, total = str(fields["status"]), fields["total_bytes"]
    if total is None or status != "downloading":
        return {"status": WORDS.get(status, status)}
    name = fields["model"]
    return {"status": f"pulling {name}", "digest": name, "total": total, "completed": min(fields["done_bytes"], total)}


def _lines(request: RequestContext, *lines: dict[str, Any]) -> Response:
    return Response(b"".join(map(line_bytes, lines)), headers=request.headers, media_type=NDJSON)
