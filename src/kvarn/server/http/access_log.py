"""One log line and one count per request, when its last byte is out. ASGI, outermost; reads what inner parts left.

scope["kvarn.request_id"]  the edge's      scope["kvarn.principal"]  auth's
scope["kvarn.log"]         a dict for routes: model, prompt_tokens, completion_tokens, cached_tokens, finish_reason
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from kvarn.observe.logs import RequestLine, log_request
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import App, Receive, Scope, Send

CLIENT_GONE = 499  # no status was sent
MAX_PATH = 200
QUIET = ("/health", "/metrics")  # asked every few seconds, also while the answer is no


class AccessLog:
    """Wraps the whole application."""

    def __init__(self, app: App, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A mutable value in the scope: inner parts may copy the scope, but not what is in it.
        facts: dict[str, Any] = scope.setdefault("kvarn.log", {})
        began = time.perf_counter()
        seen: dict[str, Any] = {"status": CLIENT_GONE, "first_byte_s": None}

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                seen["first_byte_s"] = time.perf_counter() - began
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except BaseException:
            if seen["status"] == CLIENT_GONE:
                seen["status"] = 500
            raise
        finally:
            self._traffic.responses[seen["status"]] += 1
            if not _is_quiet(scope["path"], seen["status"]):
                log_request(_line(scope, facts, seen, time.perf_counter() - began))


def _line(scope: Scope, facts: dict[str, Any], seen: dict[str, Any], duration_s: float) -> RequestLine:
    principal = scope.get("kvarn.principal")
    client = scope.get("client")
    return RequestLine(
        request_id=scope.get("kvarn.request_id", ""),
        method=scope["method"],
        path=scope["path"][:MAX_PATH],  # without the query string
        status=seen["status"],
        duration_s=duration_s,
        first_byte_s=seen["first_byte_s"],
        key=None if principal is None else principal.key_id,
        tier=None if principal is None else principal.tier.name,
        client=None if client is None else client[0],
        **facts,
    )


def _is_quiet(path: str, status: int) -> bool:
    return status in (200, 503) and any(path == one or path.startswith(one + "/") for one in QUIET)
