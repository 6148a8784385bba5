"""A pull as somebody who asked for it is told of it, and what an admin is told of failures. Knows no dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from kvarn.errors import CapacityError, ConfigError, DoesNotFit, DownloadError, KvarnError, ModelError, ModelNotFound
from kvarn.server.failures import NotServable, PullFailed
from kvarn.server.http.disconnect import client_gone
from kvarn.server.models.pulls import Pull
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.request_context import RequestContext

INTERVAL_S = 0.25  # between two reports


async def progress(request: RequestContext, pull: Pull, lifecycle: Lifecycle) -> AsyncIterator[dict[str, Any]]:
    """How far it is, whenever that has changed, until it has ended, or nobody listens."""
    gone, ended = asyncio.ensure_future(client_gone(request.receive)), asyncio.ensure_future(pull.ended.wait())
    last: dict[str, Any] = {}
    try:
        while not gone.done() and lifecycle.is_ready:
            if (fields := pull.fields()) != last:
                last = fields
                with told_to_admins():
                    fields = told(pull)
                yield fields
            if pull.ended.is_set():
                return
            await asyncio.wait({gone, ended}, timeout=INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        ended.cancel()


def told(pull: Pull) -> dict[str, Any]:
    """How far it is; raises what ended it."""
    if pull.error is not None:
        raise pull.error
    return pull.fields()


@contextmanager
def told_to_admins() -> Iterator[None]:
    """An admin is told what is wrong with files, disk and memory, with the numbers."""
    try:
        yield
    except (CapacityError, ModelNotFound):
        raise
    except DownloadError as error:
        raise PullFailed(str(error)) from error
    except (DoesNotFit, ConfigError) as error:
        raise NotServable(str(error)) from error
    except ModelError as error:
        cause = error.__cause__  # the pool tells other clients the model's id only
        why = cause if isinstance(cause, KvarnError) else error
        raise NotServable(f"the model cannot be loaded: {why}") from error
