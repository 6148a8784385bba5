"""schemathesis over the OpenAPI document: no request gets a 5xx, and every answer is as documented.

Requests as the document wants them, and requests that break it in one place: those are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conftest import Size
from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
)
OPERATIONS = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages"),
    *("POST /v1/messages/count_tokens", "POST /v1/embeddings", "POST /tokenize", "POST /detokenize"),
    *("POST /apply-template", "GET /v1/models", "GET /v1/models/{model_id}", "GET /v1/requests/{request_id}"),
    *("DELETE /v1/requests/{request_id}", "GET /health", "GET /health/live", "GET /health/ready"),
    *("GET /health/startup", "GET /metrics", "GET /version", "GET /tokenizer_info"),
    *("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
    "GET /v1/responses/{response_id}/input_items",
    *("GET /v1/collections", "POST /v1/collections", "GET /v1/collections/{name}", "DELETE /v1/collections/{name}"),
    *("GET /v1/collections/{name}/documents", "POST /v1/collections/{name}/documents"),
    *("POST /rerank", "POST /infill"),
    *("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter", "GET /lora-adapters"),
    *("POST /v1/models/pull", "POST /v1/models/cancel_pull", "POST /v1/models/load", "POST /v1/models/unload"),
    *("GET /v1/stored_models", "POST /v1/fill"),
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}"),
    *("GET /v1/files/{file_id}/content", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}"),
    "POST /v1/batches/{batch_id}/cancel",
    *("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings", "POST /api/show"),
    *("POST /api/pull", "GET /api/tags", "GET /api/ps", "GET /api/version"),
    *("POST /v1/collections/{name}/documents/delete", "POST /v1/collections/{name}/search"),
)
ENDLESS = {"GET /v1/live"}  # a stream without parameters: tests/page reads it
BODILESS = ("POST /v1/batches/{batch_id}/cancel",)  # nothing in it can be wrong
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHORT = {"type": "integer", "minimum": 1, "maximum": 4}
ENCODER_BODIES = ("Embed", "OlderEmbed")


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    with server.client() as http:
        described: dict[str, Any] = http.get("/openapi.json").json()
        return described


def test_every_route_is_in_the_table(document: dict[str, Any]) -> None:
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert described == {*OPERATIONS, *ENDLESS}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_as_documented(
    document: dict[str, Any], server: ServerProcess, client: httpx.Client, operation: str, size: Size
) -> None:
    requests = strategy(narrowed(document), operation, GenerationMode.POSITIVE)
    ask(server, requests, CHECKS, size(6, 100))
    assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.startswith("POST") and one not in BODILESS])
def test_requests_that_break_the_document_are_refused(
    document: dict[str, Any], server: ServerProcess, client: httpx.Client, operation: str, size: Size
) -> None:
    requests = strategy(document, operation, GenerationMode.NEGATIVE)
    ask(server, requests, (*CHECKS, negative_data_rejection), size(6, 100))
    assert client.get("/health/live").status_code == 200


def strategy(document: dict[str, Any], operation: str, mode: GenerationMode) -> SearchStrategy[Any]:
    method, path = operation.split()
    return schemathesis.openapi.from_dict(document)[path][method].as_strategy(generation_mode=mode)


def ask(server: ServerProcess, requests: SearchStrategy[Any], checks: Sequence[Any], num_requests: int) -> None:
    """Send so many requests, always the same ones."""

    @given(case=requests)
    @settings(
        max_examples=num_requests,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask_once(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=list(checks), timeout=60)

    ask_once()


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document for models that are there and short answers: so that requests get far."""
    document = deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if name == "OllamaOptions":
            properties["num_predict"], schema["required"] = SHORT, ["num_predict"]
        if "options" in properties:  # where Ollama has the limit
            properties["options"] = {"$ref": "#/components/schemas/OllamaOptions"}
            schema["required"] = [*schema.get("required", ()), "options"]
        if name.endswith("Body") and "model" in properties:
            properties["model"] = {"const": MINILM if name.startswith(ENCODER_BODIES) else SMOLLM2}
            for limit in LIMITS:
                if limit in properties:
                    properties[limit] = SHORT
            schema["required"] = [*schema.get("required", ()), *(limit for limit in LIMITS[::2] if limit in properties)]
    return document
