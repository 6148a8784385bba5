"""/health/live, /health/ready, /health/startup and /health: what a supervisor asks. Never waits for an engine.

They need no key; only to callers who have one, or on a server without keys, they name models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from kvarn.server.dependencies import IsKnown, Models, ServerLifecycle, Settings
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.process.lifecycle import Lifecycle

router = APIRouter(tags=["health"])

UNAVAILABLE = 503


class Health(BaseModel):
    """Whether the answer is yes, and why not."""

    status: str  # ok | the phase or the reason
    phase: str


class StartupStep(BaseModel):
    """One step of starting up; seconds are null while it runs."""

    name: str
    seconds: float | None


class Startup(Health):
    """What has been done to start up."""

    steps: list[StartupStep]


_NOT: dict[int | str, dict[str, Any]] = {UNAVAILABLE: {"model": Health, "description": "not now; the body says why"}}


@router.get("/health/live", response_model=Health, responses=_NOT, summary="Is the process worth keeping?")
async def live(lifecycle: ServerLifecycle, is_known: IsKnown) -> JSONResponse:
    """503 when an engine with work shows no progress for heartbeat_timeout_s; an idle or full one is alive."""
    return _answer(lifecycle, _why_not_alive(lifecycle), is_known)


@router.get("/health/ready", response_model=Health, responses=_NOT, summary="Should requests be sent here?")
async def ready(lifecycle: ServerLifecycle, models: Models, settings: Settings, is_known: IsKnown) -> JSONResponse:
    """200 after the first model has computed a token, while the queues have room, until SIGTERM."""
    return _answer(lifecycle, _why_not_ready(lifecycle, models, settings.queue_limit), is_known)


@router.get("/health", response_model=Health, responses=_NOT, summary="The same as /health/ready")
async def health(lifecycle: ServerLifecycle, models: Models, settings: Settings, is_known: IsKnown) -> JSONResponse:
    """For clients that know one path only."""
    return await ready(lifecycle, models, settings, is_known)


@router.get(
    "/health/startup",
    response_model=Startup,
    responses={UNAVAILABLE: {"model": Startup, "description": "still starting; the body says what is being done"}},
    summary="How far is starting up?",
)
async def startup(lifecycle: ServerLifecycle, is_known: IsKnown) -> JSONResponse:
    """503 while models are loaded, then 200 for good."""
    steps = [
        {"name": f"{step.name} {step.model}" if is_known else step.name, "seconds": step.seconds}
        for step in lifecycle.steps
    ]
    content: dict[str, Any] = {"status": "ok", "phase": lifecycle.phase, "steps": steps}
    if lifecycle.is_started:
        return JSONResponse(content)
    return JSONResponse({**content, "status": "starting"}, UNAVAILABLE, {"retry-after": "1"})


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why the answer is no; in the words for a model there is a place for its name."""

    words: str
    model: str | None = None

    def told(self, is_known: bool) -> str:
        return self.words.format((self.model if is_known else None) or "a model")


def _why_not_alive(lifecycle: Lifecycle) -> _Reason | None:
    stuck = lifecycle.stuck_model()
    return None if stuck is None else _Reason("the engine of {} makes no progress", stuck)


def _why_not_ready(lifecycle: Lifecycle, models: ModelPool, queue_limit: int) -> _Reason | None:
    if not lifecycle.is_ready:
        return _Reason(lifecycle.phase)
    if (reason := _why_not_alive(lifecycle)) is not None:
        return reason
    for model in models.loaded:
        if not model.llm.llm.client.is_alive:  # a lost device, say: at once, and the watchdog ends the process later
            return _Reason("the engine of {} has ended or is stuck", model.id)
        if model.llm.llm.num_waiting >= queue_limit:
            return _Reason("the queue of {} is full", model.id)
    return None


def _answer(lifecycle: Lifecycle, reason: _Reason | None, is_known: bool) -> JSONResponse:
    if reason is None:
        return JSONResponse({"status": "ok", "phase": lifecycle.phase})
    content = {"status": reason.told(is_known), "phase": lifecycle.phase}
    return JSONResponse(content, UNAVAILABLE, {"retry-after": "1"})
