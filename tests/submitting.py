"""Requests for an Engine, with and without the client in front of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OnEvent, RequestHandle
from kvarn.engine.submission import Submission
from kvarn.request import Request
from kvarn.types import SamplingParams


def new_request(id: str, prompt_ids: Sequence[int], params: SamplingParams, *limits: int, **fields: Any) -> Request:
    """A request as Engine.submit_choice makes it; limits: max_total_tokens and seed."""
    now = fields.get("clock", time.perf_counter)()
    deadline_at = math.inf if params.deadline_s is None else now + params.deadline_s
    made = {"token_ids": list(prompt_ids), "priority": params.priority, "submitted_at": now, "deadline_at": deadline_at}
    return Request(id, tuple(prompt_ids), params, *limits, **made, **fields)


def submit(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    fork_of: Request | None = None,
    **options: Any,
) -> Request:
    """Queue one choice of a request; options are fields of Submission."""
    return engine.submit_choice(Submission(prompt_ids, params, **options), choice, fork_of)


def submit_to(
    client: EngineClient,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    on_event: OnEvent | None = None,
    **options: Any,
) -> RequestHandle:
    """The same through a client, with all choices."""
    return client.submit(Submission(prompt_ids, params, **options), on_event)
