"""What the engine, the template or the tokenizer refuses is told by the name of the field that was sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, TEXT, chat_body, refusal, text_body
from tests.server.process import MINILM, SMOLLM2

pytestmark = pytest.mark.model
CONTEXT = 2048
LONG, ENDLESS = "word " * (CONTEXT + 500), "word " * (10 * CONTEXT)
ASKED: dict[str, Any] = {"model": SMOLLM2, "max_tokens": 4}
HI = [{"role": "user", "content": "Hi"}]
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_body(diffusion={"steps": 2}), "diffusion"),
        (CHAT, chat_body(chat_template_kwargs={"messages": 1}), "chat_template_kwargs"),
        (CHAT, chat_body(LONG), "messages"),
        (CHAT, chat_body(ENDLESS), "messages"),
        (CHAT, chat_body(model=MINILM), "model"),
        (CHAT, chat_body(n=16, max_tokens=2000), "n"),
        (CHAT, chat_body(n=16, max_tokens=None, max_completion_tokens=2000), "n"),
        (TEXT, text_body(LONG), "prompt"),
        (TEXT, text_body(ENDLESS), "prompt"),
        (TEXT, text_body(["Hi"] * 5000), "prompt"),
        (TEXT, text_body(["Hi"] * 1000, n=16), "n"),
        (TEXT, text_body([1] * (CONTEXT + 1)), "prompt"),
        (TEXT, text_body(model=MINILM), "model"),
        (RESPONSES, {"model": SMOLLM2, "input": LONG}, "input"),
        (RESPONSES, {"model": SMOLLM2, "input": ENDLESS}, "input"),
        (RESPONSES, {"model": MINILM, "input": "Hi"}, "model"),
        (EMBEDDINGS, {"model": SMOLLM2, "input": "Hi"}, "model"),
        (EMBEDDINGS, {"model": MINILM, "input": LONG}, "input"),
        (EMBEDDINGS, {"model": MINILM, "input": [10**6]}, "input"),
        ("/tokenize", {"prompt": "word " * (40 * CONTEXT)}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/apply-template", {"messages": HI, "chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs"),
        ("/rerank", {"model": SMOLLM2, "query": "word " * 5000, "documents": ["x"]}, "query"),
        ("/v1/collections", {"name": "fields", "chunk_tokens": 64, "overlap": 64}, "overlap"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_names_the_field(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(client, path, body)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("search", {"query": "x", "filter": {"$what": 1}}, "filter"),
        ("search", {"query": "x", "weights": [0, 0]}, "weights"),
        ("search", {"query": "x", "rerank": "nobody"}, "rerank"),
        ("documents", {"documents": [{"text": "x", "metadata": {"$b": 1}}]}, "documents.0.metadata"),
        ("documents", {"documents": [{"text": "x", "id": "1"}, {"text": "y", "id": "1"}]}, "documents"),
    ],
    ids=str,
)
def test_so_does_one_of_a_collection(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    client.post("/v1/collections", json={"name": "fields"})
    status = 404 if "rerank" in fields else 400
    assert refusal(client, f"/v1/collections/fields/{path}", fields, status)["param"] == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": LONG}]}, "prompt is too long"),
        ({"messages": [{"role": "user", "content": ENDLESS}]}, "prompt is too long"),
        ({"model": MINILM}, "model"),
        ({"stop_sequences": ["é" * 129]}, "stop_sequences"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_anthropics_clients_read_it_in_the_message(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    told = client.post(MESSAGES, json=ASKED | {"messages": HI} | fields)
    assert told.status_code == 400, told.text
    assert words in told.json()["error"]["message"].partition(":")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_constraint_lets_nothing_follow_names_the_constraint(
    client: httpx.Client, stream: bool
) -> None:
    rules = "\n".join(f'r{number}: "b" "c{number}"' for number in range(2500))
    grammar = f'start: "a" rest\nrest: {" | ".join(f"r{number}" for number in range(2500))}\n{rules}\n'
    body = chat_body(guided_grammar=grammar, stream=stream)
    told = client.post(CHAT, json=body).text
    lines = [line for line in told.splitlines() if '"error"' in line]
    error = json.loads(lines[0].removeprefix("data: "))["error"]
    assert (error["code"], error["param"]) == ("constraint_error", "guided_grammar")
