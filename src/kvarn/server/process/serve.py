"""The server process: bind, listen, load, print one line when ready, serve, drain, exit code.

Health answers from the first moment, while models are still loading. Knows sockets, signals and the model pool; what a
request means is known to the routes.

    0 ended by a signal, everything drained    1 could not start, or the watchdog ended it    128 + n  second signal
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

from starlette.types import ASGIApp

from kvarn import __version__
from kvarn.errors import ConfigError
from kvarn.observe.logs import configure_logging, with_fields
from kvarn.observe.metrics import Metrics
from kvarn.server.access.keys import KeyRing
from kvarn.server.access.shared.limits import make_limits
from kvarn.server.api.responses.response_store import ResponseStore
from kvarn.server.app import make_app
from kvarn.server.batches.execution import BatchExecution
from kvarn.server.batches.jobs import BatchJobs
from kvarn.server.chat.generation import Generations
from kvarn.server.collections.collection_pool import CollectionPool, storage_of
from kvarn.server.collections.document_reader import DocumentReader
from kvarn.server.collections.prefix_warmup import PrefixWarmup
from kvarn.server.collections.storage_quota import StorageQuota
from kvarn.server.http.connections import Listener
from kvarn.server.http.traffic import Traffic
from kvarn.server.live.sampler import LiveSampler
from kvarn.server.models.model_pool import ModelPool
from kvarn.server.models.pulls import Pulls
from kvarn.server.process.http_server import make_http_server
from kvarn.server.process.interpreter import tune_for_serving
from kvarn.server.process.lifecycle import Lifecycle, ShuttingDown
from kvarn.server.process.listening import listening, remove_file, shown_address
from kvarn.server.process.service_manager import ServiceManager
from kvarn.server.process.settings import ServerConfig
from kvarn.server.process.tls import Certificate
from kvarn.server.process.watchdog import Watchdog
from kvarn.server.process.worker_threads import WorkerThreads
from kvarn.server.replica.publisher import ReplicaPublisher
from kvarn.server.state import ServerState
from kvarn.structured.compiler import MAX_COMPILING

log = logging.getLogger("kvarn.server")

# After the deadline, in all less than the 5 s that an operator adds to the delay and the timeout:
FLUSH_S = 3.0  # for answers to send their final bytes
CLOSE_S = 0.5  # for each part to close its files; a load under way cannot be interrupted
NUM_THREADS = 64  # made when needed: for models, files and whatever is done for no key
SIGNALS = (signal.SIGTERM, signal.SIGINT)
Extend = Callable[[ServerState, ASGIApp], ASGIApp]
OnReady = Callable[[str], object]


def serve(config: ServerConfig, extend: Extend | None = None, on_ready: OnReady | None = None) -> int:
    """Run the server until a signal ends it; returns the exit code.

    extend may wrap the application; on_ready is called in a thread with the page's address, once it can be asked.
    """
    configure_logging(config.log_level)
    for one in SIGNALS:
        signal.signal(one, _leave)  # until the loop takes them: what was made by then is removed
    # Not asyncio.run: it would wait for threads that cannot be interrupted, such as a grammar being compiled.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(NUM_THREADS, "kvarn-server"))
    try:
        certificate = None if config.tls_cert is None else Certificate(config)
        with listening(config) as listener:
            return loop.run_until_complete(
                _run(config, listener, certificate, extend or (lambda _, app: app), on_ready)
            )
    finally:
        loop.close()


async def _run(
    config: ServerConfig,
    listener: Listener,
    certificate: Certificate | None,
    extend: Extend,
    on_ready: OnReady | None,
) -> int:
    return await ServerRun(config, listener, certificate, extend, on_ready).run()


class ServerRun:
    """The server process from listening to the exit code."""

    def __init__(
        self,
        config: ServerConfig,
        listener: Listener,
        certificate: Certificate | None,
        extend: Extend,
        on_ready: OnReady | None = None,
    ) -> None:
        self._config = config
        self._on_ready = on_ready
        self._listener = listener
        self._certificate = certificate
        self._manager = ServiceManager()
        self._state = make_state(config)
        self._lifecycle = self._state.lifecycle
        app = extend(self._state, make_app(self._state))
        self._server = make_http_server(self._state, app, listener, certificate)
        models, timeout_s = self._state.models, config.heartbeat_timeout_s
        self._watchdog = Watchdog(lambda: [(one.id, one.llm.llm.client) for one in models.loaded], timeout_s)
        self._lifecycle.stuck_model = lambda: self._watchdog.stuck_model
        self._ended = asyncio.Event()  # a signal asked for the end
        self._num_signals = 0
        self._flush_by = math.inf  # time.monotonic() when the final bytes must have been sent

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for one in SIGNALS:
            loop.add_signal_handler(one, self._take_signal, one)
        loop.add_signal_handler(signal.SIGTSTP, self._pause)
        if self._certificate is not None or self._manager.is_there:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        serving = asyncio.create_task(self._server.serve([self._listener]))
        ended = asyncio.create_task(self._ended.wait())
        watched = asyncio.create_task(self._manager.keep_watchdog(lambda: self._lifecycle.stuck_model() is None))
        try:
            await self._start(ended)
            if self._lifecycle.is_started:
                await asyncio.wait([ended, serving], return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    raise RuntimeError("the HTTP server ended by itself") from serving.exception()
                await self._drain()
        finally:
            ended.cancel()
            watched.cancel()
            self._watchdog.stop()
            self._stop()
            await self._close(serving)
        return 0

    async def _start(self, ended: asyncio.Task[bool]) -> None:
        """Load, warm up, and print that the server is ready; a signal meanwhile ends the process."""
        await self._state.limits.start()
        loading = asyncio.create_task(self._state.models.start(self._lifecycle.begin_step))
        await asyncio.wait([loading, ended], return_when=asyncio.FIRST_COMPLETED)
        if self._ended.is_set():
            self._exit_now(0)  # nothing was accepted, and a load cannot be interrupted
        loading.result()
        self._watchdog.start()
        tune_for_serving()
        self._lifecycle.become_ready()
        self._state.batches.start(BatchExecution(self._state))
        _print_line(f"kvarn: {self._status}")
        self._manager.tell_ready(self._status)
        if self._on_ready is not None:
            page = f"{shown_address(self._listener, self._config)}{self._config.root_path}/"
            asyncio.get_running_loop().run_in_executor(None, self._on_ready, page)
        steps = {f"{step.name} {step.model}": round(step.seconds or 0.0, 3) for step in self._lifecycle.steps}
        log.info("ready", extra=with_fields(models=list(self._state.models.ids), steps=steps))

    @property
    def _status(self) -> str:
        return f"serving {', '.join(self._state.models.ids)} on {shown_address(self._listener, self._config)}"

    async def _drain(self) -> None:
        """Graceful shutdown: accept for the delay, refuse, wait for what runs, end it at the deadline."""
        config, lifecycle = self._config, self._lifecycle
        lifecycle.drain()
        self._manager.tell_stopping()
        log.info("draining", extra=with_fields(requests=lifecycle.num_requests, delay_s=config.drain_delay_s))
        await asyncio.sleep(config.drain_delay_s)
        lifecycle.refuse()
        log.info("refusing", extra=with_fields(requests=lifecycle.num_requests, timeout_s=config.drain_timeout_s))
        if await self._is_idle_within(config.drain_timeout_s):
            log.info("drained")
            return
        num_ended = lifecycle.num_requests
        self._stop()
        self._state.generations.fail_all(ShuttingDown())
        log.warning("the drain deadline ended requests", extra=with_fields(requests=num_ended))
        await self._is_idle_within(self._flush_left_s)

    def _stop(self) -> None:
        """From here on only final bytes are sent."""
        self._lifecycle.stop()
        self._flush_by = min(self._flush_by, time.monotonic() + FLUSH_S)

    @property
    def _flush_left_s(self) -> float:
        return max(0.0, self._flush_by - time.monotonic())

    async def _is_idle_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lifecycle.until_idle(), timeout_s)
        return self._lifecycle.num_requests == 0

    async def _close(self, serving: asyncio.Task[None]) -> None:
        # For bytes that a slow reader has not taken yet.
        self._server.config.timeout_graceful_shutdown = int(self._flush_left_s)
        self._server.should_exit = True
        await _closed("the HTTP server", serving)
        for part in self._state.closing_parts:
            await _closed(type(part).__name__, asyncio.wait_for(part.close(), CLOSE_S))

    def _take_signal(self, signum: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            log.warning("a second signal ends the process at once")
            self._exit_now(128 + signum)
        self._ended.set()

    def _exit_now(self, code: int) -> NoReturn:
        remove_file(self._listener)
        os._exit(code)

    def _reload(self) -> None:
        """SIGHUP: read the certificate again; keys are read when their file changes."""
        self._manager.tell_reloading()
        try:
            if self._certificate is not None:
                self._certificate.read_again()
            log.info("reloaded")
        except ConfigError as error:
            log.error("the certificate was not read again, the one from before stays: %s", error)
        if self._lifecycle.is_ready:
            self._manager.tell_ready(self._status)

    def _pause(self) -> None:
        """Ctrl-Z: the watchdog must not count the time for which the process stands still."""
        self._watchdog.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._watchdog.resume()


def _print_line(line: str) -> None:
    """Print to stdout if possible: a full disk or a closed pipe is no reason to stop serving."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("nothing can be written to stdout", extra=with_fields(error=type(error).__name__))
        with suppress(OSError):  # what is buffered would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _closed(part: str, closing: Awaitable[None]) -> None:
    """Wait until a part has closed; one that fails keeps no other from it."""
    try:
        await closing
    except TimeoutError:
        log.warning("a part did not close in time", extra=with_fields(part=part))  # a load under way
    except Exception as error:  # its message may quote a request
        log.error("a part was not closed cleanly", extra=with_fields(part=part, error=type(error).__name__))


def make_state(config: ServerConfig) -> ServerState:
    """All parts of the server; nothing is loaded yet."""
    models = ModelPool(config)
    storage = storage_of(config)
    collections, lifecycle = CollectionPool(models, storage), Lifecycle()
    metrics = Metrics(models.ids, tiers=config.tiers, compat=config.metrics_compat, version=__version__)
    responses = ResponseStore(config.response_store, config.response_store_bytes)
    return ServerState(
        config=config,
        models=models,
        pulls=Pulls(),
        collections=collections,
        keys=KeyRing(config.keys, config.tiers),
        limits=make_limits(config.limits, config.limits_when_away, metrics),
        metrics=metrics,
        lifecycle=lifecycle,
        prefix_warmup=PrefixWarmup(models, collections, lifecycle, metrics),
        generations=Generations(
            metrics, config.queue_limit, WorkerThreads(MAX_COMPILING, num_reserved=1, max_per_key=1)
        ),
        traffic=Traffic(),
        document_reader=DocumentReader(),
        storage=StorageQuota(storage),
        workers=WorkerThreads(),
        request_threads=WorkerThreads(),
        body_thread=WorkerThreads(num_threads=1, num_reserved=0, max_per_key=None),
        responses=responses,
        live=LiveSampler(models),
        batches=BatchJobs(config),
        replica=ReplicaPublisher(config.engine.cluster_key, models, lifecycle, responses.tag),
    )


def _leave(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(0)
