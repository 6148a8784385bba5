"""Requests for an Engine, with and without the client in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.engine.client import EngineClient
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OnEvent, RequestHandle
from kvarn.engine.submission import Submission
from kvarn.request import Request
from kvarn.types import SamplingParams


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
