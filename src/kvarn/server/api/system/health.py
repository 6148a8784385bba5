"""/health/live, /health/ready, /health/startup and /health: what a supervisor asks. Never waits for an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

if TYPE_CHECKING:
    from kvarn.server.state import ServerState

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
async def live(request: Request) -> JSONResponse:
    """503 when an engine with work shows no progress for heartbeat_timeout_s; an idle or full one is alive."""
    state = _state(request)
    stuck = state.lifecycle.stuck_model()
    return _answer(state, None if stuck is None else f"the engine of {stuck} makes no progress")


@router.get("/health/ready", response_model=Health, responses=_NOT, summary="Should requests be sent here?")
async def ready(request: Request) -> JSONResponse:
    """200 after the first model has computed a token, while the queues have room, until SIGTERM."""
    state = _state(request)
    return _answer(state, _why_not_ready(state))


@router.get("/health", response_model=Health, responses=_NOT, summary="The same as /health/ready")
async def health(request: Request) -> JSONResponse:
    """For clients that know one path only."""
    return await ready(request)


@router.get(
    "/health/startup",
    response_model=Startup,
    responses={UNAVAILABLE: {"model": Startup, "description": "still starting; the body says what is being done"}},
    summary="How far is starting up?",
)
async def startup(request: Request) -> JSONResponse:
    """503 while models are loaded, then 200 for good."""
    lifecycle = _state(request).lifecycle
    steps = [{"name": step.name, "seconds": step.seconds} for step in lifecycle.steps]
    content: dict[str, Any] = {"status": "ok", "phase": lifecycle.phase, "steps": steps}
    if lifecycle.is_started:
        return JSONResponse(content)
    return JSONResponse({**content, "status": "starting"}, UNAVAILABLE, {"retry-after": "1"})


def _why_not_ready(state: ServerState) -> str | None:
    if not state.lifecycle.is_ready:
        return state.lifecycle.phase
    if (stuck := state.lifecycle.stuck_model()) is not None:
        return f"the engine of {stuck} makes no progress"
    for served in state.shelf.loaded:
        if served.llm.llm.num_waiting >= state.config.queue_limit:
            return f"the queue of {served.id} is full"
    return None


def _answer(state: ServerState, reason: str | None) -> JSONResponse:
    phase = state.lifecycle.phase
    if reason is None:
        return JSONResponse({"status": "ok", "phase": phase})
    return JSONResponse({"status": reason, "phase": phase}, UNAVAILABLE, {"retry-after": "1"})


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.kvarn
    return state
