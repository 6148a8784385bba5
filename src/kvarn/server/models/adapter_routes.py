"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter as vLLM has them, GET /lora-adapters as llama-server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvarn.errors import AuthError, CapacityError, ModelError
from kvarn.server.api.schema import Answer, Body, InvalidField, body_of
from kvarn.server.dependencies import Called, Models, Settings
from kvarn.server.models.adapters import ServedAdapter, confined

router = APIRouter(tags=["models"])


class LoadLoraBody(Body):
    """Which adapter to load, and what clients call it."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=4096, description="Below the folder of --lora-dir")
    base_model: str | None = Field(None, description="An id of /v1/models; without it the first")
    load_inplace: bool | None = Field(None, description="Replace one of this name; those that run keep it")


class UnloadLoraBody(Body):
    """Which adapter to offer no more."""

    INERT = frozenset({"lora_int_id"})
    lora_name: str = Field(min_length=1, max_length=128)


class LoraCard(Answer):
    """An adapter that was loaded."""

    id: str
    object: str = "lora_adapter"
    parent: str
    digest: str
    num_bytes: int


class LlamaServerLora(Answer):
    """An adapter as llama-server lists it; requests name it by its id."""

    id: int
    path: str
    scale: float


@router.post("/v1/load_lora_adapter", response_model=LoraCard, openapi_extra=body_of(LoadLoraBody))
async def load_lora_adapter(request: Called, models: Models, settings: Settings) -> Response:
    """Load an adapter from the server's folder and offer it as a model; for keys with admin = true."""
    request.require_admin("adapters are loaded and unloaded")
    body = await request.body(LoadLoraBody)
    path = confined(settings.lora_dir, body.lora_path)
    base = models.default_id if body.base_model is None else body.base_model
    loading = models.adapters.load(models, body.lora_name, path, base, replaces=bool(body.load_inplace))
    try:
        adapter = await request.while_awaited(loading)
    except (CapacityError, AuthError):
        raise
    except ModelError as error:  # the operator asked, so that the operator is told what is wrong with the files
        why = str(error).replace(str(path), body.lora_path)
        raise InvalidField(f"the adapter cannot be loaded: {why}", "lora_path") from error
    return request.reply(_card(adapter))


@router.post("/v1/unload_lora_adapter", response_model=LoraCard, openapi_extra=body_of(UnloadLoraBody))
async def unload_lora_adapter(request: Called, models: Models) -> Response:
    """Offer an adapter no more; requests that run with it end as they would have. For keys with admin = true."""
    request.require_admin("adapters are loaded and unloaded")
    body = await request.body(UnloadLoraBody)
    adapter = models.adapters.get(body.lora_name)
    await models.adapters.unload(models, body.lora_name)
    assert adapter is not None, "else it was refused"
    return request.reply(_card(adapter))


@router.get("/lora-adapters", response_model=list[LlamaServerLora])
async def list_lora_adapters(request: Called, models: Models) -> Response:
    """List the adapters of the first model; requests without `lora` use none of them, so that every scale is 0."""
    known = models.adapters.of_model(models.default_id)
    return request.reply([{"id": number, "path": one.name, "scale": 0.0} for number, one in enumerate(known)])


def _card(adapter: ServedAdapter) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "lora_adapter",
        "parent": adapter.base_id,
        "digest": adapter.digest,
        "num_bytes": adapter.num_bytes,
    }
