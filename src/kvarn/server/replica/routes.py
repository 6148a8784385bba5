"""GET /v1/replica/events: what a router of this server's cluster hears.

No API key opens it, the cluster's own does: see kvarn.routing.feed for the proof and the lines.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from kvarn.errors import AuthError, CapacityError
from kvarn.routing.feed import PATH, PROOF_HEADER
from kvarn.server.dependencies import Replica

router = APIRouter(tags=["operations"])
MAX_ROUTERS = 64  # that listen at a time


@router.get(PATH, response_class=Response, include_in_schema=False)
async def events(http: Request, replica: Replica) -> Response:
    """Stream what this server holds and how busy it is, one line each, until it drains or the router is gone."""
    if not replica.is_member:
        raise AuthError(
            "this server belongs to no cluster; start it with --cluster-key, the same file as the router's",
            reason="forbidden",
        )
    writer = replica.writer(http.headers.get(PROOF_HEADER, ""))
    if writer is None:
        raise AuthError("this is no proof of this server's cluster key; give both the same file", reason="forbidden")
    if replica.num_listeners >= MAX_ROUTERS:
        raise CapacityError(f"{MAX_ROUTERS} routers listen already; try again later", retry_after_s=10.0)
    return StreamingResponse(replica.lines(writer), media_type="application/x-ndjson")
