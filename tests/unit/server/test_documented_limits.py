"""The limits of docs/server-limits.md are those of the code, and the largest bodies they allow are taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarn.server.api.openai.chat_schema import MAX_MESSAGES, ChatBody
from kvarn.server.api.openai.completions_schema import CompletionBody
from kvarn.server.api.openai.embeddings_schema import MAX_INPUTS, EmbeddingsBody
from kvarn.server.api.openai.translation import conversation_of
from kvarn.server.api.schema import (
    BYTES_PER_TOKEN,
    COUNTED_BYTES_PER_TOKEN,
    MAX_TOKEN_IDS,
    MAX_VALUES,
    Body,
    InvalidField,
)
from kvarn.server.api.system.tokens_schema import DetokenizeBody
from kvarn.server.api.validation import parse
from kvarn.server.chat.output.tools import MAX_SCHEMA_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES, check_tools
from kvarn.server.collections.rerank_schema import MAX_RERANKED, RerankBody
from kvarn.server.collections.schema import FILE_BYTES_PER_TOKEN, MAX_DOCUMENTS, DocumentsBody
from kvarn.server.failures import BadBody
from kvarn.server.http.json_body import MAX_MEMBERS, parse_body
from kvarn.server.process.settings import ServerConfig
from kvarn.structured.constraints import MAX_CONSTRAINT_BYTES

PAGE = Path(__file__).parents[3] / "docs" / "server-limits.md"
CONFIG = ServerConfig(models=("m",))


def tools(sizes: list[int]) -> list[dict[str, Any]]:
    """Tools whose schemas have so many bytes, as agents write them: a name, a type and some words for each field."""
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema(size)}}
        for number, size in enumerate(sizes)
    ]


def schema(num_bytes: int) -> dict[str, Any]:
    described: dict[str, Any] = {"type": "object", "properties": {}}
    while (left := num_bytes - len(json.dumps(described))) > 120:
        name = f"field_{len(described['properties'])}"
        described["properties"][name] = {"type": "string", "description": "what it is for"}
    return described | {"title": "x" * (left - len(', "title": ""'))}


def chat() -> dict[str, Any]:
    rest = (MAX_TOOLS_BYTES - MAX_SCHEMA_BYTES) // (MAX_TOOLS - 1)
    messages = [{"role": "user", "content": "x"}] * MAX_MESSAGES
    return {"model": "m", "messages": messages, "tools": tools([MAX_SCHEMA_BYTES] + [rest] * (MAX_TOOLS - 1))}


def ids(num_lists: int) -> list[list[int]]:
    return [[123_456] * (MAX_TOKEN_IDS // num_lists)] * num_lists


LARGEST: dict[str, tuple[type[Body], Callable[[], dict[str, Any]]]] = {
    "messages and tools": (ChatBody, chat),
    "prompts": (CompletionBody, lambda: {"model": "m", "prompt": ids(CONFIG.queue_limit)}),
    "one prompt": (CompletionBody, lambda: {"model": "m", "prompt": ids(1)[0]}),
    "inputs": (EmbeddingsBody, lambda: {"model": "m", "input": ids(MAX_INPUTS)}),
    "tokens": (DetokenizeBody, lambda: {"tokens": ids(1)[0]}),
    "documents": (DocumentsBody, lambda: {"documents": [{"text": "x" * 8000}] * MAX_DOCUMENTS}),
    "ranked": (RerankBody, lambda: {"model": "m", "query": "x", "documents": ["x" * 8000] * MAX_RERANKED}),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_body_of_its_kind_is_taken(name: str) -> None:
    kind, make = LARGEST[name]
    data = json.dumps(make(), separators=(",", ":")).encode()
    assert len(data) <= CONFIG.max_body_bytes
    body = parse(kind, parse_body(data, CONFIG.max_json_depth, kind.MAX_VALUES))
    if isinstance(body, ChatBody):
        assert len(check_tools(conversation_of(body, CONFIG.max_n).tools)) == MAX_TOOLS


def test_one_more_is_not() -> None:
    sizes = [MAX_TOOLS_BYTES // MAX_TOOLS] * MAX_TOOLS
    assert len(check_tools(tools(sizes))) == MAX_TOOLS
    for wrong in ([size + 1 for size in sizes], [1000] * (MAX_TOOLS + 1), [MAX_SCHEMA_BYTES + 1]):
        with pytest.raises(InvalidField, match="tools"):
            check_tools(tools(wrong))
    for kind, field in ((EmbeddingsBody, "input"), (CompletionBody, "prompt"), (DetokenizeBody, "tokens")):
        with pytest.raises(InvalidField, match=field):
            parse(kind, {"model": "m", field: [1] * (MAX_TOKEN_IDS + 1)})
    with pytest.raises(BadBody, match="values"):
        parse_body(json.dumps({"a": [1] * (MAX_VALUES + 1)}).encode(), 64)


def test_the_page_has_the_numbers_of_the_code() -> None:
    page = PAGE.read_text()
    for number, words in (
        (MAX_VALUES, "values"),
        (MAX_MEMBERS, "fields"),
        (MAX_TOKEN_IDS, "token ids"),
        (MAX_TOOLS, "tools"),
        (MAX_MESSAGES, "messages"),
        (MAX_INPUTS, "inputs"),
        (MAX_DOCUMENTS, "documents"),
        (MAX_SCHEMA_BYTES, "bytes"),
        (MAX_TOOLS_BYTES, "bytes"),
        (MAX_CONSTRAINT_BYTES, "bytes"),
        (BYTES_PER_TOKEN, "bytes"),
        (COUNTED_BYTES_PER_TOKEN, "bytes"),
        (FILE_BYTES_PER_TOKEN, "bytes"),
    ):
        assert f"{number:,} {words}" in page
