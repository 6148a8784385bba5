"""One log line per request, when its last byte is out."""

from __future__ import annotations

from starlette.types import Scope

from kvarn.observe.logs import RequestLine, log_request
from kvarn.server.process.lifecycle import is_probe

MAX_PATH = 200
PROBE_STATUS = (200, 503)  # of probes, which are sent every few seconds: not logged, also while the answer is no


def log_access(scope: Scope, status: int, first_byte_s: float | None, duration_s: float) -> None:
    """Log what the pipeline and the routes left in the scope of a request."""
    if status in PROBE_STATUS and is_probe(scope["path"]):
        return
    principal = scope.get("kvarn.principal")
    client = scope.get("client")
    log_request(
        RequestLine(
            request_id=scope["kvarn.request_id"],
            method=scope["method"],
            path=scope["path"][:MAX_PATH],  # without the query string
            status=status,
            duration_s=duration_s,
            first_byte_s=first_byte_s,
            key=None if principal is None else principal.key_id,
            tier=None if principal is None else principal.tier.name,
            client=None if client is None else client[0],
            **scope["kvarn.log"],
        )
    )
