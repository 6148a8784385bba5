"""The OpenAPI document: FastAPI's, with the bodies, errors and keys that it does not see."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.models import Schema
from fastapi.openapi.utils import get_openapi

from kvarn.server.api.anthropic import errors as anthropic
from kvarn.server.api.ollama import errors as ollama
from kvarn.server.api.openai import errors as openai
from kvarn.server.api.schema import BODIES, Body

METHODS = ("get", "post", "delete")


def describe(app: FastAPI, *, needs_key: bool, root_path: str = "") -> dict[str, Any]:
    """The document; made once, then cached by the application. root_path: the prefix of all its paths."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for path, operations in document["paths"].items():
            for method in METHODS:
                if method in operations:
                    _complete(path, operations[method], schemas)
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(Error=openai.SCHEMA, AnthropicError=anthropic.SCHEMA, OllamaError=ollama.SCHEMA)
        if root_path:
            document["servers"] = [{"url": root_path}]
        if needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Write a body's schema, its definitions where references look for them, and the errors every route may give."""
    for media in operation.get("requestBody", {}).get("content", {}).values():
        name = media["schema"].get("title")
        if name is not None:
            schemas[name] = _body_schema(BODIES[name])
            schemas.update(schemas[name].pop("$defs", {}))
            media["schema"] = {"$ref": f"#/components/schemas/{name}"}
    answers = operation["responses"]
    answers.pop("422", None)
    kind = "AnthropicError" if anthropic.is_path(path) else "OllamaError" if ollama.is_path(path) else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    for status, words in (("4XX", "the request cannot be served as asked"), ("5XX", "the server could not serve it")):
        answers.setdefault(status, {"description": words, "content": content})


def _body_schema(model: type[Body]) -> Any:
    """As FastAPI writes those that it sees."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    return jsonable_encoder(Schema(**schema), by_alias=True, exclude_none=True)
