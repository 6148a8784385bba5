"""GET /v1/live: what the server does now, as a stream; for the page and for `kvarn top`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.errors import CapacityError
from kvarn.server.api.openai.chat_stream import STREAM_FORMAT
from kvarn.server.api.schema import EVENT_STREAM, Answer
from kvarn.server.dependencies import Called, Live, Models, RunningGenerations, ServerLifecycle, Settings
from kvarn.server.http.disconnect import client_gone
from kvarn.server.http.json_body import write_json
from kvarn.server.http.sse import EventStreamResponse
from kvarn.server.live.frames import frame
from kvarn.server.live.sampler import LiveSample, LiveSampler
from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["operations"])
MAX_WATCHERS = 32
MAX_STREAM_S = 60.0  # then a client asks again: a revoked key watches no longer than this


class LiveAnswer(Answer):
    """One event: the models with their engines, and the caller's requests; of others only counts."""

    object: Literal["live"]
    models: list[dict[str, Any]]
    requests: list[dict[str, Any]]


@router.get("/v1/live", response_model=LiveAnswer, responses={200: {"content": EVENT_STREAM}})
async def live(
    *,
    request: Called,
    live: Live,
    models: Models,
    generations: RunningGenerations,
    lifecycle: ServerLifecycle,
    settings: Settings,
) -> Response:
    """Stream at most four times a second what runs: requests, steps, cache blocks, models; ends after a minute."""
    if live.num_watchers >= MAX_WATCHERS:
        raise CapacityError(f"{MAX_WATCHERS} clients watch already; try again later", retry_after_s=10.0)
    told: dict[str, int] = {}

    async def events() -> AsyncIterator[bytes]:
        async for sample in _samples(request, live):
            event = frame(sample, models.entries(), generations.of(request.principal), told)
            yield b"data: " + write_json(event) + b"\n\n"
            if not lifecycle.is_ready:  # it must not keep the server from ending
                return

    return EventStreamResponse(request, events(), STREAM_FORMAT, comment=lambda: "live", ping_s=settings.ping_s)


async def _samples(request: RequestContext, live: LiveSampler) -> AsyncIterator[LiveSample]:
    """Samples as they are taken, until the client is gone or has watched for long enough."""
    gone = asyncio.ensure_future(client_gone(request.receive))
    until = time.monotonic() + MAX_STREAM_S
    with live.watched():
        try:
            while not gone.done() and time.monotonic() < until:
                yield await live.sample()
                await asyncio.wait({gone}, timeout=live.interval_s)
        finally:
            gone.cancel()
