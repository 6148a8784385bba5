"""A tiny application behind the real connections, body reader and pipeline, in a process of its own.

`python -m tests.server.edge_app '{"header_timeout_s": 1}'` prints its port. Routes that wait, stream and fail on
demand, without a model, so that limits can be reached in a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvarn.errors import KvarnError
from kvarn.server.access.auth import Authenticator
from kvarn.server.access.keys import KeyRing
from kvarn.server.failures import failure_response
from kvarn.server.http.connections import ACCEPTED_PER_TURN, Listener
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.json_body import parse_body, read_body
from kvarn.server.http.pipeline import RequestPipeline
from kvarn.server.http.protocol import make_protocol
from kvarn.server.http.traffic import Traffic
from kvarn.server.process.lifecycle import Lifecycle
from kvarn.server.process.settings import make_config

SECRET = "/srv/models/secret.gguf at 0x7f00dead sk-kvarn-123"
TOLD = (HTTPException, KvarnError, Exception)
CHUNK = b"x" * (16 << 10)


class Site:
    """The routes, and what they counted."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config = make_config({"port": 0, **settings})
        self.lifecycle = Lifecycle()
        self.protocol: Any = make_protocol(self.config, self.lifecycle, Traffic())
        self.num_cancelled = 0
        self.num_finished = 0

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def echo(self, request: Request) -> Response:
        return JSONResponse(parse_body(await read_body(request, self.config), self.config.max_json_depth))

    async def hosts(self, request: Request) -> Response:
        return JSONResponse({"host": request.headers["host"], "url": request.url.path, "query": request.url.query})

    async def tokens(self, request: Request) -> Response:
        count, gap_s = int(request.query_params["n"]), float(request.query_params.get("gap", "0.01"))
        return StreamingResponse(self._tokens(count, gap_s), media_type="text/event-stream")

    async def _tokens(self, count: int, gap_s: float) -> AsyncIterator[bytes]:
        try:
            for number in range(count):
                yield f"data: token {number}\n\n".encode()
                await asyncio.sleep(gap_s)
            self.num_finished += 1
        except BaseException:
            self.num_cancelled += 1
            raise

    async def flood(self, request: Request) -> Response:
        return StreamingResponse(self._flood(float(request.query_params.get("gap", "0"))))

    async def _flood(self, gap_s: float) -> AsyncIterator[bytes]:
        try:
            while True:
                yield CHUNK
                await asyncio.sleep(gap_s)
        except BaseException:
            self.num_cancelled += 1
            raise

    async def page(self, request: Request) -> Response:
        return Response(b"x" * int(request.query_params["size"]))

    async def wait(self, request: Request) -> Response:
        """Answers never, and notices when nobody waits for it any more; as generation without streaming does."""
        with suppress(ClientDisconnect):
            await request.body()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.num_cancelled += 1
        return Response()

    async def early(self, request: Request) -> Response:
        """Answers without a look at the body, as a refused key does."""
        return JSONResponse({"error": {"message": "no"}}, 401)

    async def boom(self, request: Request) -> Response:
        raise RuntimeError(SECRET)

    async def drain(self, request: Request) -> Response:
        self.lifecycle.refuse()
        return JSONResponse({})

    async def figures(self, request: Request) -> Response:
        book = self.protocol.connections_of_server
        with open("/proc/self/statm") as statm:
            rss_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return JSONResponse(
            {
                "fds": len(os.listdir("/proc/self/fd")),
                "tasks": len(asyncio.all_tasks()),
                "rss_bytes": rss_bytes,
                "open": book.traffic.num_open,
                "dropped": book.traffic.num_dropped,
                "body_bytes": book.num_body_bytes,
                "cancelled": self.num_cancelled,
                "finished": self.num_finished,
            }
        )

    def app(self) -> RequestPipeline:
        routes = [
            Route("/health", self.health),
            Route("/echo", self.echo, methods=["POST"]),
            Route("/hosts", self.hosts, methods=["GET", "POST"]),
            Route("/tokens", self.tokens),
            Route("/flood", self.flood),
            Route("/page", self.page),
            Route("/wait", self.wait, methods=["GET", "POST"]),
            Route("/early", self.early, methods=["POST"]),
            Route("/boom", self.boom),
            Route("/drain", self.drain),
            Route("/figures", self.figures),
        ]
        always_ready = Lifecycle()  # /drain is for the connections, which have one of their own
        always_ready.become_ready()
        return RequestPipeline(
            Starlette(routes=routes, exception_handlers=dict.fromkeys(TOLD, _told)),
            browsers=BrowserPolicy(self.config),
            auth=Authenticator(KeyRing(None), takes_local=True),
            lifecycle=always_ready,
            traffic=Traffic(),
            root_path=self.config.root_path,
        )


async def _told(request: Request, error: Exception) -> Response:
    return failure_response(error, request.url.path)


def main() -> None:
    settings = json.loads(sys.argv[1])
    if limit := settings.pop("max_descriptors", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    site = Site(settings)
    listener = Listener()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((site.config.host, 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        site.app(),
        http=site.protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=ACCEPTED_PER_TURN,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
