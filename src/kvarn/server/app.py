"""The application of one server: the routes, and the pipeline around them."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from kvarn import __version__
from kvarn.errors import KvarnError
from kvarn.server.access.auth import Authenticator
from kvarn.server.api.anthropic import routes as messages
from kvarn.server.api.field_names import NO_FIELDS
from kvarn.server.api.fill import routes as fill
from kvarn.server.api.llama_server import infill_routes
from kvarn.server.api.ollama import catalog_routes, embed_routes, pull_routes
from kvarn.server.api.ollama import routes as ollama
from kvarn.server.api.openai import chat_routes, completions_routes, embeddings_routes
from kvarn.server.api.responses import routes as responses
from kvarn.server.api.responses import stored_routes
from kvarn.server.api.system import about, health, metrics, requests, tokens
from kvarn.server.batches import batch_routes, file_routes
from kvarn.server.collections import rerank_routes
from kvarn.server.collections import routes as collections
from kvarn.server.dependencies import request_context
from kvarn.server.direct_routes import DirectRoutes, Endpoint
from kvarn.server.failures import failure_response
from kvarn.server.http.cors import BrowserPolicy
from kvarn.server.http.pipeline import GIVEN_FIELDS, LOG_FIELDS, REQUEST_ID, RequestPipeline
from kvarn.server.live import routes as live
from kvarn.server.models import adapter_routes, admin_routes
from kvarn.server.models import routes as models
from kvarn.server.openapi import describe
from kvarn.server.page import routes as page
from kvarn.server.replica import routes as replica
from kvarn.server.state import ServerState

DOCUMENT = "/openapi.json"
ROUTES = (
    *(chat_routes, completions_routes, infill_routes, responses, stored_routes, messages, embeddings_routes),
    *(fill, ollama, embed_routes, catalog_routes, pull_routes, file_routes, batch_routes),
    *(rerank_routes, collections, models, adapter_routes, admin_routes, tokens, requests, health, metrics, about),
    *(live, page, replica),
)


# What many clients ask at once: a request costs the event loop half as much without the layers of a router.
DIRECT: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_routes.chat_completions,
    "/v1/completions": completions_routes.completions,
    "/v1/messages": messages.create_message,
    "/v1/responses": responses.create_response,
}


def make_app(state: ServerState) -> FastAPI:
    """The ASGI application of one server."""
    pipeline = Middleware(
        RequestPipeline,
        browsers=BrowserPolicy(state.config),
        auth=Authenticator(state.keys, takes_local=state.config.takes_local),
        lifecycle=state.lifecycle,
        traffic=state.traffic,
        root_path=state.config.root_path,
        tag=state.responses.tag,
    )
    direct = Middleware(DirectRoutes, state=state, routes=DIRECT, fail=_fail)
    app = FastAPI(
        title="Kvarn",
        version=__version__,
        openapi_url=None,  # ours is made in a thread, see below
        docs_url=None,  # FastAPI's loads scripts from elsewhere; about.py has ours
        redoc_url=None,
        redirect_slashes=False,
        middleware=[pipeline, direct],
        exception_handlers={KvarnError: _fail, HTTPException: _fail},  # the pipeline answers for all others
    )
    app.state.kvarn = state
    for module in ROUTES:
        app.include_router(module.router)
    app.openapi = lambda: describe(  # type: ignore[method-assign]
        app, needs_key=not state.keys.is_open, root_path=state.config.root_path
    )
    app.add_route(DOCUMENT, _document, include_in_schema=False)
    return app


async def _document(http: Request) -> Response:
    """Making the document takes a third of a second, once."""
    async with request_context(http) as request:
        return JSONResponse(await request.while_awaited(asyncio.to_thread(http.app.openapi)))


async def _fail(http: Request, error: Exception) -> Response:
    path = http.scope["path"]
    response = failure_response(
        error, path, http.scope[REQUEST_ID], http.scope[LOG_FIELDS], http.scope.get(GIVEN_FIELDS, NO_FIELDS)
    )
    if "allow" in response.headers:  # the router knows the first route with this path only
        response.headers["allow"] = ", ".join(_methods(path))
    return response


def _methods(path: str) -> list[str]:
    """The methods of all routes with a path; the pipeline makes GET of HEAD."""
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))
