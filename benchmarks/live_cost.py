"""What watching costs: the share of a server's CPU seconds that GET /v1/live takes while users stream answers.

    python -m benchmarks.live_cost [--users 8] [--seconds 30] [--watchers 1] [--pairs 0] [--write live-cost]

On a machine that others use, two runs differ by more than watching costs. So by itself nothing is compared: the server
counts the CPU seconds of everything that it does for its watchers (snapshots on the engine's thread, frames, JSON,
writing, the task that waits; by the clock of the thread), and of the whole process meanwhile. What it costs
the event loop to be woken is seen only by the last figure: the CPU seconds per second of a server that does nothing but
show that. On a quiet machine --pairs 20 also compares tokens/s with and without watchers, in turns, as the users go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
import types
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import httpx
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.assets import smollm2
from tests.results import write_result
from tests.server.process import ServerProcess

from kvarn.cli.main import main as run_kvarn
from kvarn.engine.engine import Engine
from kvarn.server.live import sampler
from kvarn.server.live.engine_snapshot import EngineSnapshot, take_snapshot
from kvarn.server.process import serve as serving
from kvarn.server.state import ServerState

LIVE, SPENT = "/v1/live", "/spent"


def main() -> None:
    """Print a line for people and one JSON line, last, for machines."""
    if sys.argv[1:2] == ["serve"]:
        return run_counting_server()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--watchers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=0, help="how often tokens/s are compared, in turns")
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args()
    model = ("--model", f"m={smollm2()}", "--context", "2048", "--no-prefix-cache")
    with ServerProcess(*model, module="benchmarks.live_cost") as server:
        ended = threading.Event()
        with ThreadPoolExecutor(options.users) as users:
            counts = [0] * options.users
            asked = [users.submit(ask, server, number, ended, counts) for number in range(options.users)]
            busy = measure(server, options)
            ratios = [watched_to_alone(server, options, counts, is_first=at % 2 == 0) for at in range(options.pairs)]
            ended.set()
            for one in asked:
                one.result()
        idle = [measure(server, options, watchers=number) for number in (0, options.watchers)]
    share = busy["live_s"] / busy["process_s"]
    woken = (idle[1]["process_s"] - idle[0]["process_s"]) / options.seconds
    found = {"users": options.users, "watchers": options.watchers, "tokens": sum(counts), "frames": busy["frames"]}
    found |= {"share": round(share, 5), "ms_per_frame": round(1000 * busy["live_s"] / busy["frames"], 3)}
    found |= {"engine_thread_s": busy["snapshot_s"], "process_s": busy["process_s"], "clock_s": options.seconds}
    print(
        f"{options.users} users, {options.watchers} watching: {100 * share:.2f}% of the server's CPU seconds, "
        f"{found['ms_per_frame']} ms a frame; a server without users takes {1000 * woken:.1f} ms a second more"
    )
    found |= {"idle_ms_per_s": round(1000 * woken, 2)}
    if ratios:
        spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios
        found |= {"pairs": len(ratios), "tokens_per_s_ratio": round(statistics.median(ratios), 5)}
        found |= {"tokens_per_s_ratio_quartiles": [round(one, 5) for one in (spread[0], spread[-1])]}
        print(f"tokens/s watched to alone: {found['tokens_per_s_ratio']} (median of {len(ratios)} pairs)")
    if options.write:
        command = f"python -m benchmarks.live_cost --users {options.users} --pairs {options.pairs}"
        write_result(options.write, found, command=command)
    print(json.dumps(found))
    return None


def measure(server: ServerProcess, options: argparse.Namespace, watchers: int | None = None) -> dict[str, float]:
    """What the server spent while it was watched for a while."""
    ended = threading.Event()
    number = options.watchers if watchers is None else watchers
    threads = [threading.Thread(target=watch, args=(server, ended)) for _ in range(number)]
    with server.client() as http:
        for thread in threads:
            thread.start()
        time.sleep(2.0)  # the streams have begun
        before = http.get(SPENT).json()
        time.sleep(options.seconds)
        after = http.get(SPENT).json()
    ended.set()
    for thread in threads:
        thread.join()
    return {name: after[name] - before[name] for name in after}


def watched_to_alone(server: ServerProcess, options: argparse.Namespace, counts: list[int], *, is_first: bool) -> float:
    """Tokens per second with watchers to those without, one right after the other; which comes first takes turns."""
    rates: dict[bool, float] = {}
    for is_watched in (is_first, not is_first):
        ended = threading.Event()
        number = options.watchers if is_watched else 0
        threads = [threading.Thread(target=watch, args=(server, ended)) for _ in range(number)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        before, began = sum(counts), time.monotonic()
        time.sleep(options.seconds / 3)
        rates[is_watched] = (sum(counts) - before) / (time.monotonic() - began)
        ended.set()
        for thread in threads:
            thread.join()
    return rates[True] / rates[False]


def ask(server: ServerProcess, number: int, ended: threading.Event, counts: list[int]) -> None:
    """Long answers, one after another; counts how many tokens came."""
    body = {"model": "m", "prompt": f"Story {number}:", "max_tokens": 512, "temperature": 0, "ignore_eos": True}
    with server.client() as http:
        while not ended.is_set():
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    counts[number] += line.startswith("data: {")
                    if ended.is_set():
                        break


def watch(server: ServerProcess, ended: threading.Event) -> None:
    """Read the stream as the page does: asked again when it ends."""
    with server.client() as http:
        while not ended.is_set():
            with http.stream("GET", LIVE, timeout=httpx.Timeout(60)) as frames:
                for _ in frames.iter_lines():
                    if ended.is_set():
                        return


class Spent:
    """CPU seconds of what is done for watchers, by the thread that does it."""

    def __init__(self) -> None:
        self.loop_s = self.snapshot_s = 0.0  # each is written by one thread
        self.frames = 0

    def told(self) -> dict[str, float]:
        live_s = self.loop_s + self.snapshot_s
        return {
            "live_s": live_s,
            "snapshot_s": self.snapshot_s,
            "frames": self.frames,
            "process_s": time.process_time(),
        }

    def snapshot(self, engine: Engine) -> EngineSnapshot:
        """take_snapshot, counted: runs on the engine's thread."""
        before = time.thread_time()
        taken = take_snapshot(engine)
        self.snapshot_s += time.thread_time() - before
        self.frames += 1
        return taken

    @types.coroutine
    def steps_of(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await a coroutine, and count what each of its steps takes."""
        given: Any = None
        thrown: BaseException | None = None
        while True:
            before = time.thread_time()
            try:
                waits_for = work.send(given) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                self.loop_s += time.thread_time() - before
            given = thrown = None
            try:
                given = yield waits_for
            except BaseException as error:
                thrown = error


class CountingApp:
    """ASGI: counts requests for the stream with the tasks that they start, and tells what was counted."""

    def __init__(self, spent: Spent, _state: ServerState, app: ASGIApp) -> None:
        self._spent = spent
        self._app = app
        self._is_watching: ContextVar[bool] = ContextVar("is_watching", default=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (LIVE, SPENT):
            await self._app(scope, receive, send)
        elif scope["path"] == SPENT:
            await JSONResponse(self._spent.told())(scope, receive, send)
        else:
            asyncio.get_running_loop().set_task_factory(self._task)
            self._is_watching.set(True)
            await self._counted(self._app(scope, receive, send))

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **fields: Any) -> asyncio.Task[Any]:
        return asyncio.Task(self._counted(work) if self._is_watching.get() else work, loop=loop, **fields)

    async def _counted(self, work: Any) -> Any:
        return await self._spent.steps_of(work)


def run_counting_server() -> None:
    """Run the command line, with a server that counts."""
    spent = Spent()
    sampler.take_snapshot = spent.snapshot  # type: ignore[assignment]
    serving.serve = partial(serving.serve, extend=partial(CountingApp, spent))
    run_kvarn()


if __name__ == "__main__":
    main()
