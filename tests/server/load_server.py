"""`python -m tests.server.load_server serve ...`: the real server, which also tells where its CPU time went.

GET /cpu       seconds of the whole process, and of those inside calls of the native core, since the start
GET /garbage   objects that only the collector could free, since the start

Inside a call counts the CPU time of the engine's thread and of the core's pool. Whatever else runs meanwhile (the
event loop, encoding) is outside, and so is a pool that spins between two calls.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvarn.server.process import serve as serving
from kvarn.server.state import ServerState

STEP_CALLS = ("forward", "begin", "advance", "sample", "score", "copy_block")


class MeteredCore:
    """Stands before a model of the native core and counts the CPU time of the calls that make up a step."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._pool = _pool_clocks()
        self.num_calls = 0
        self.native_s = 0.0
        for name in STEP_CALLS:
            setattr(self, name, partial(self._call, getattr(core, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        before_s = self._now_s()
        try:
            return work(*args)
        finally:
            self.num_calls += 1
            self.native_s += self._now_s() - before_s

    def _now_s(self) -> float:
        return time.thread_time() + sum(map(time.clock_gettime, self._pool))


class FigureRoutes:
    """ASGI: answers /cpu and /garbage, passes everything else on."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        self._state = state
        self._app = app
        self._core: MeteredCore | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = {"/cpu": self._cpu, "/garbage": _garbage}
        if scope["type"] != "http" or scope["path"] not in answers:
            await self._app(scope, receive, send)
            return
        told = answers[scope["path"]]()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    def _cpu(self) -> dict[str, float]:
        core = self._core = self._core or self._metered()
        return {"process_s": time.process_time(), "native_s": core.native_s, "native_calls": core.num_calls}

    def _metered(self) -> MeteredCore:
        """From the first question on; the pool exists, since a token has been computed for the warm-up."""
        backend: Any = self._state.models.loaded[0].llm.llm.client.call(lambda engine: engine.backend).result()
        backend._model = MeteredCore(backend._model)
        core: MeteredCore = backend._model
        return core


def _garbage() -> dict[str, float]:
    gc.collect()
    return {"objects": sum(generation["collected"] for generation in gc.get_stats())}


def _pool_clocks() -> list[int]:
    """Clocks of the CPU time of the pool's threads: those Python did not start, and that have computed something."""
    known = {thread.native_id for thread in threading.enumerate()}
    foreign = [thread_id for thread_id in map(int, os.listdir("/proc/self/task")) if thread_id not in known]
    # pthread_getcpuclockid(), by the kernel's id. The watchdog's timer is a thread, too, but does nothing.
    clocks = [~thread_id << 3 | 6 for thread_id in foreign]
    return [clock for clock in clocks if time.clock_gettime(clock) > 0.001]


def main() -> None:
    """Run the command line with a server that has the routes above."""
    from kvarn.cli.main import main as run

    serving.serve = partial(serving.serve, extend=FigureRoutes)
    run()


if __name__ == "__main__":
    main()
