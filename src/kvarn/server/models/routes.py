"""GET /v1/models and /v1/models/{id}: what this server offers, loaded or not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.server.dependencies import Called, Models
from kvarn.server.models import schema
from kvarn.server.models.catalog import CatalogEntry

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=schema.ModelList, openapi_extra={"parameters": list(schema.PAGE_PARAMETERS)})
async def list_models(http: Request, request: Called, models: Models) -> Response:
    """List the models, the default one first; limit, after_id and before_id in the query ask for a part of them."""
    page = schema.Page.of(http.query_params)
    entries = [_fields(entry) for entry in models.entries()]
    part, has_more = page.cut([entry["id"] for entry in entries])
    shown = entries[part]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return request.reply({"object": "list", "data": shown, **ends, "has_more": has_more})


@router.get("/v1/models/{model_id:path}", response_model=schema.ModelCard)
async def get_model(request: Called, models: Models, model_id: str) -> Response:
    """Describe one model."""
    return request.reply(_fields(models.entry(model_id)))


def _fields(entry: CatalogEntry) -> dict[str, Any]:
    created = datetime.fromtimestamp(entry.created, UTC)
    return {
        "id": entry.id,
        "object": "model",
        "type": "model",
        "created": entry.created,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "owned_by": "kvarn",
        "display_name": entry.id,
        "kind": entry.kind,
        "max_model_len": entry.context,
        "digest": entry.digest,
        "is_loaded": entry.is_loaded,
        "root": entry.parent or entry.id,
        "parent": entry.parent,
        "is_diffusion": entry.is_diffusion,
        "can_fill": entry.can_fill,
        "sampling": dict(entry.sampling),
    }
