"""GET / and its files: the page, open to everybody, because a browser sends no key when it opens one.

It tells nothing about this server: whatever it shows it asks the API for, with the key that its user gives it.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvarn.server.dependencies import Settings
from kvarn.server.page.assets import FOLDER, HEADERS, NAMES, POLICY, ROOT, Asset, asset, page

router = APIRouter()
RUNNING = "Ollama is running"


@router.get(ROOT, include_in_schema=False)
async def root(http: Request, settings: Settings) -> Response:
    """The page; for clients of Ollama, which look here whether it runs, the words that they look for."""
    if "text/html" not in http.headers.get("accept", "text/html"):
        return Response(RUNNING, headers={**HEADERS, "vary": "accept"}, media_type="text/plain")
    return _response(http, page(settings.root_path))


@router.get(FOLDER + "{name:path}", include_in_schema=False)
async def file(http: Request, name: str) -> Response:
    """One of its files."""
    if name not in NAMES:
        raise HTTPException(404)
    return _response(http, asset(name))


def _response(http: Request, found: Asset) -> Response:
    """The file, compressed for whoever reads that, or that the browser's copy is still right."""
    headers = {**HEADERS, "content-security-policy": POLICY, "etag": found.etag, "vary": "accept, accept-encoding"}
    if http.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in http.headers.get("accept-encoding", ""):
        return Response(found.content, headers=headers, media_type=found.media_type)
    return Response(found.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=found.media_type)
