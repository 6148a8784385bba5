"""/v1/files: upload, list, look at, read and delete the files of a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.server.api.schema import InvalidField
from kvarn.server.batches.listing import page_of, parameters
from kvarn.server.batches.multipart import boundary_of, parse_form
from kvarn.server.batches.schema import DeletedFile, FileAnswer, FileList
from kvarn.server.dependencies import Batches, Called, Charged

router = APIRouter(tags=["batches"])
MAX_PAGE = 10_000
PURPOSES = ("batch",)  # that can be uploaded
FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}}
CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


@router.post("/v1/files", response_model=FileAnswer, openapi_extra=UPLOAD)
async def upload_file(http: Request, request: Charged, batches: Batches) -> Response:
    """Keep a file for a batch."""
    files = batches.files
    boundary = boundary_of(http.headers.get("content-type", ""))
    data = await request.raw_body()
    form = await request.in_thread(lambda: parse_form(data, boundary))
    for name in ("file", "purpose"):
        if name not in form:
            raise InvalidField(f"the form has no {name}; send file and purpose", name, "missing_field")
    if unknown := sorted(set(form) - {"file", "purpose"}):
        raise InvalidField(f"the form has {unknown[0]!r:.80}; send file and purpose", unknown[0], "unknown_field")
    purpose = form["purpose"].data.decode("utf-8", "replace").strip()
    if purpose not in PURPOSES:
        raise InvalidField(f"purpose is {purpose!r:.80}; give {' or '.join(PURPOSES)}", "purpose")
    file, owner = form["file"], request.principal.fingerprint
    stored = await request.in_thread(lambda: files.put(owner, file.filename or "file", purpose, file.data))
    return request.reply(stored.told())


@router.get("/v1/files", response_model=FileList, openapi_extra={"parameters": parameters(MAX_PAGE, MAX_PAGE)})
async def list_files(http: Request, request: Called, batches: Batches) -> Response:
    """List the files of the key."""
    found, purpose = batches.files.of(request.principal.fingerprint), http.query_params.get("purpose")
    shown = [one for one in found if purpose in (None, one.purpose)]
    return request.reply(page_of(shown, http.query_params, MAX_PAGE, MAX_PAGE))


@router.get("/v1/files/{file_id}", response_model=FileAnswer)
async def get_file(request: Called, batches: Batches, file_id: str) -> Response:
    """Tell what is known of a file."""
    return request.reply(batches.files.get(request.principal.fingerprint, file_id).told())


@router.get("/v1/files/{file_id}/content", responses=CONTENT, response_class=Response)
async def file_content(request: Charged, batches: Batches, file_id: str) -> Response:
    """Read a file."""
    files = batches.files
    stored = files.get(request.principal.fingerprint, file_id)
    data = await request.in_thread(files.path(stored).read_bytes)
    return Response(data, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", response_model=DeletedFile)
async def delete_file(request: Called, batches: Batches, file_id: str) -> Response:
    """Delete a file."""
    files, owner = batches.files, request.principal.fingerprint
    await request.in_thread(lambda: files.delete(owner, file_id))
    return request.reply({"id": file_id, "object": "file", "deleted": True})
