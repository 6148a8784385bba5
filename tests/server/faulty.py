"""`python -m tests.server.faulty serve ...`: the real server with routes that break its engine. Only for tests.

POST /fault/raise?step=K&count=N   forward passes K .. K + N - 1 from now raise
POST /fault/nan?step=K&count=N     ... compute NaN for their first row
POST /fault/unreadable?token=K&where=W  the bytes of token K cannot be read by the engine (text) or the server (scores)
POST /fault/slow?seconds=S         every pass from now on takes S longer, in Python; 0: no longer
POST /fault/behind?seconds=S       the event loop takes tokens only so often, as if it were behind; 0: as usual
POST /fault/slow-load?seconds=S    every load of a model from now on takes S longer
POST /fault/close                  the prefix warm-up and the collections will not close without an error
POST /fault/full-threads?seconds=S every thread in which requests are read or worked for sleeps for S
POST /fault/python-loop            the engine's thread loops in Python for ever
POST /fault/native-loop            ... waits in native code for ever and keeps the GIL
POST /fault/stuck-kernel           ... waits in native code for ever without the GIL
GET  /fault/state                  requests, blocks, tasks and open files of the process
The engine is the first loaded model's, or that of &model=NAME.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from kvarn.engine.delivery import drain_pacing
from kvarn.engine.engine import Engine
from kvarn.llm import LLM
from kvarn.server.access.priority_semaphore import Claim
from kvarn.server.models import model_pool
from kvarn.server.process import serve as serving
from kvarn.server.process import worker_threads
from kvarn.server.state import ServerState

_NEXT_AT = drain_pacing.DrainPacing.next_at


class FaultRoutes:
    """ASGI: answers /fault/..., passes everything else on."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        self._state = state
        self._app = app
        self._own_thread = ThreadPoolExecutor(1)  # for what must answer when no other is free
        self._sleeping: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/fault/"):
            await self._app(scope, receive, send)
            return
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        answer = await self._inject(scope["path"].removeprefix("/fault/"), query)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _inject(self, kind: str, query: dict[str, str]) -> object:
        llm = next(one for one in self._state.models.loaded if one.id == query.get("model", one.id)).llm.llm
        step, count = int(query.get("step", "1")), int(query.get("count", "1"))
        if kind == "state":
            return await self._figures(llm)
        if kind in ("raise", "nan"):
            break_pass = _raising if kind == "raise" else _not_a_number
            await _on_engine(llm, partial(_wrap_forward, step=step, count=count, break_pass=break_pass))
        elif kind == "unreadable":
            _make_unreadable(llm, int(query["token"]), query["where"])
        elif kind == "slow":
            await _on_engine(llm, partial(_slow_down, seconds=float(query["seconds"])))
        elif kind == "behind":
            _fall_behind(float(query["seconds"]))
        elif kind == "close":
            _break_close(self._state.prefix_warmup)
            _break_close(self._state.collections)
        elif kind == "slow-load":
            _slow_down_loads(float(query["seconds"]))
        elif kind == "full-threads":
            self._fill_threads(float(query["seconds"]))
        else:
            loops: dict[str, Callable[[Engine], None]] = {
                "python-loop": _loop_in_python,
                "native-loop": _loop_with_the_gil,
                "stuck-kernel": _loop_without_the_gil,
            }
            threading.Timer(0.05, lambda: llm.client.call(loops[kind])).start()  # after the answer is out
        return {"injected": kind}

    def _fill_threads(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(serving.NUM_THREADS):
            loop.run_in_executor(None, time.sleep, seconds)
        for pool in (self._state.workers, self._state.request_threads):
            for _ in range(worker_threads.NUM_THREADS):
                self._sleeping.add(loop.create_task(pool.run(Claim(), time.sleep, seconds)))

    async def _figures(self, llm: LLM) -> dict[str, int]:
        stats = await asyncio.get_running_loop().run_in_executor(self._own_thread, llm.stats)
        gc.collect()
        return {
            "http_requests": self._state.lifecycle.num_requests,
            "generations": len(self._state.generations),
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks_used": stats.blocks_used,
            "generated_tokens": stats.generated_tokens,
            "progress": sum(map(_progress, self._state.models.loaded)),
            "tasks": len(asyncio.all_tasks()),
            "files": _num_files(),
            "threads": threading.active_count(),
        }


def _num_files() -> int:
    """Those that are open, without regular ones: the prefix cache opens and closes its own as it likes."""
    if not os.path.isdir("/proc/self/fd"):
        return 0
    targets = [_target(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(not os.path.isfile(target) for target in targets)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # that of the listing itself
        return ""


def _progress(model: model_pool.ServedModel) -> int:
    """Of the backend, if it is in this process."""
    engine = getattr(model.llm.llm.client._thread, "_engine", None)
    return 0 if engine is None else engine.backend.progress


async def _on_engine(llm: LLM, work: Callable[[Engine], None]) -> None:
    await asyncio.wrap_future(llm.client.call(work))


def _wrap_forward(
    engine: Engine, step: int, count: int, break_pass: Callable[[Callable[[Any], Any], Any], Any]
) -> None:
    backend: Any = engine.backend
    real = type(backend).forward.__get__(backend)
    passes = iter(range(1, step + count))

    def forward(batch: Any) -> Any:
        number = next(passes, None)
        if number is None:
            backend.forward = real
        return real(batch) if number is None or number < step else break_pass(real, batch)

    backend.forward = forward


def _raising(_: Callable[[Any], Any], batch: Any) -> Any:
    raise RuntimeError("injected: the pass failed")


def _make_unreadable(llm: LLM, token_id: int, where: str) -> None:
    """Only one place is broken: the engine's thread reads text, the event loop writes scores."""
    tokenizer: Any = llm.tokenizer
    real = type(tokenizer).token_bytes.__get__(tokenizer)

    def token_bytes(wanted: int) -> bytes:
        is_engine = threading.current_thread().name == "kvarn-engine"
        if wanted == token_id and is_engine == (where == "text"):
            raise RuntimeError("injected: a token that cannot be read")
        return bytes(real(wanted))

    tokenizer.token_bytes = token_bytes
    tokenizer._piece_cache.clear()  # what was read before is remembered


def _not_a_number(real: Callable[[Any], Any], batch: Any) -> Any:
    hidden = real(batch)
    hidden[:1] = float("nan")
    return hidden


def _slow_down(engine: Engine, seconds: float) -> None:
    backend: Any = engine.backend
    real = type(backend).forward.__get__(backend)

    def forward(batch: Any) -> Any:
        time.sleep(seconds)
        return real(batch)

    backend.forward = forward if seconds > 0 else real


def _fall_behind(seconds: float) -> None:
    def later(_: Any, began_at: float, *__: Any) -> float:
        return began_at + seconds

    drain_pacing.DrainPacing.next_at = later if seconds > 0 else _NEXT_AT  # type: ignore[method-assign]


def _slow_down_loads(seconds: float) -> None:
    real = model_pool.load_served

    async def loaded(plan: Any) -> Any:
        await asyncio.sleep(seconds)
        return await real(plan)

    model_pool.load_served = loaded


def _break_close(part: Any) -> None:
    async def close() -> None:
        raise KeyError("injected: what somebody asked")

    part.close = close


def _loop_in_python(_: Engine) -> None:
    while True:
        pass


def _loop_with_the_gil(_: Engine) -> None:
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()  # until a signal comes, and none comes to this thread


def _loop_without_the_gil(_: Engine) -> None:
    libc = ctypes.CDLL(None)
    while True:
        libc.pause()


def main() -> None:
    """Run the command line with a server that has the routes above."""
    from kvarn.cli.main import main as run

    serving.serve = partial(serving.serve, extend=FaultRoutes)
    run()


if __name__ == "__main__":
    import importlib

    importlib.import_module("tests.server.faulty").main()  # by this name an engine's process finds the functions above
