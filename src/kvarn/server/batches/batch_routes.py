"""/v1/batches: create, list, look at and cancel the batches of a key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.server.api.schema import body_of
from kvarn.server.batches.listing import DEFAULT_PAGE, page_of, parameters
from kvarn.server.batches.schema import BatchBody, BatchList, BatchObject
from kvarn.server.dependencies import Batches, Called, Charged

router = APIRouter(tags=["batches"])
MAX_PAGE = 100


@router.post("/v1/batches", response_model=BatchObject, openapi_extra=body_of(BatchBody))
async def create_batch(request: Charged, batches: Batches) -> Response:
    """Answer the requests of a file, when nobody else waits."""
    body = await request.body(BatchBody)
    owner = request.principal.fingerprint
    return request.reply(batches.create(owner, body.endpoint, body.input_file_id, body.metadata).told())


@router.get("/v1/batches", response_model=BatchList, openapi_extra={"parameters": parameters(MAX_PAGE, DEFAULT_PAGE)})
async def list_batches(http: Request, request: Called, batches: Batches) -> Response:
    """List the batches of the key."""
    assert batches.files is not None
    found = batches.of(request.principal.fingerprint)
    return request.reply(page_of(found, http.query_params, MAX_PAGE, DEFAULT_PAGE))


@router.get("/v1/batches/{batch_id}", response_model=BatchObject)
async def get_batch(request: Called, batches: Batches, batch_id: str) -> Response:
    """Tell how far a batch is."""
    return request.reply(batches.get(request.principal.fingerprint, batch_id).told())


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
async def cancel_batch(request: Called, batches: Batches, batch_id: str) -> Response:
    """End a batch; what was answered is kept."""
    job = batches.get(request.principal.fingerprint, batch_id)
    batches.cancel(job)
    return request.reply(job.told())
