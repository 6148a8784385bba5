"""GET /version, and /docs: a page that shows /openapi.json and sends requests.

The page is one file of the package, and its policy names its own script and style by their digests: nothing else runs,
and nothing is fetched from elsewhere. It needs no key, because a browser sends none when it opens a page; it tells
nothing about this server either, and asks for a key before it fetches the document.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from kvarn import __version__
from kvarn.server.api.schema import Answer
from kvarn.server.dependencies import Called

router = APIRouter(tags=["operations"])
CLOSED = ("base-uri", "form-action", "frame-ancestors")


class VersionAnswer(Answer):
    """The installed version."""

    version: str


@router.get("/version", response_model=VersionAnswer)
async def version(request: Called) -> Response:
    """Tell the version of the server."""
    return request.reply({"version": __version__})


@router.get("/docs", include_in_schema=False)
async def page() -> Response:
    content, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[str, str]:
    """The page, and the policy that lets exactly its own script and style run."""
    style, script = _read("page.css"), _read("page.js")
    content = _read("page.html").replace("/*page.css*/", style).replace("/*page.js*/", script)
    rules = [
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "connect-src 'self'",
        *(f"{rule} 'none'" for rule in CLOSED),
        "require-trusted-types-for 'script'",
    ]
    return content, "; ".join(rules)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return files(__package__).joinpath("docs_page", name).read_text(encoding="utf-8")
