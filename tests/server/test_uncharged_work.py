"""What a request costs before anything is computed is charged by its bytes, before it is spent, and ends with it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.edge_client import Client, post, until
from tests.server.keyed import KeyedServer
from tests.server.process import SMOLLM2, ServerProcess
from tests.server.scraping import read, scrape
from tests.server.test_storage_limits import cpu_s, is_quiet
from tests.unit.retrieval.pdfs import make_pdf

pytestmark = pytest.mark.model
WORDS = "".join(f"w{number} " for number in range(20_000))
FRUGAL = 60_000  # tokens a minute
COUNT = "/v1/messages/count_tokens"


@pytest.fixture
def newcomer(keyed: KeyedServer, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A new key of the tier that has as many tokens as free ones by default."""
    name = request.node.name[:40]
    key = keyed.add(name, "frugal")
    with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
        until(lambda: client.get("/v1/models").status_code == 200)
        yield client
    keyed.remove(name)


def ranking(num_documents: int, num_characters: int) -> dict[str, Any]:
    return {"model": SMOLLM2, "query": WORDS[:num_characters], "documents": ["a mill"] * num_documents}


def test_ranking_is_charged_before_its_prompts_are_made(keyed: KeyedServer, newcomer: httpx.Client) -> None:
    """The query is read with each document: 1.5 KB become 1.5 MB."""
    assert newcomer.post("/rerank", json=ranking(1, 100)).status_code == 200
    began = cpu_s(keyed.process)
    assert newcomer.post("/tokenize", json={"prompt": WORDS[:1500] * 16}).status_code == 200
    of_sixteen_s = cpu_s(keyed.process) - began
    began = cpu_s(keyed.process)
    refused = newcomer.post("/rerank", json=ranking(1024, 1500))
    assert refused.status_code == 400
    assert "may take" in refused.json()["error"]["message"]
    assert cpu_s(keyed.process) - began < 8 * max(of_sixteen_s, 0.02)


def test_ranking_ends_with_its_caller(keyed: KeyedServer) -> None:
    with keyed.client("boss") as client:
        began = cpu_s(keyed.process)
        assert client.post("/rerank", json=ranking(16, 1500)).status_code == 200
        of_sixteen_s = cpu_s(keyed.process) - began
        began = cpu_s(keyed.process)
        with Client(keyed.process.port) as leaving:
            key = f"authorization: Bearer {keyed.keys['boss']}"
            leaving.send(post("/rerank", httpx.Request("POST", keyed.url, json=ranking(1024, 1500)).content, key))
            until(lambda: client.get("/fault/state").json()["http_requests"] > 0)
        until(lambda: is_quiet(keyed.process))
        assert cpu_s(keyed.process) - began < of_sixteen_s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "minilm", "input": ["x" * 8_000] * 200}),
        ("/v1/completions", {"model": SMOLLM2, "prompt": ["x" * 8_000] * 200}),
        ("/v1/chat/completions", {"model": SMOLLM2, "messages": [{"role": "user", "content": WORDS * 12}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_minute_cannot_pay_is_refused_unread(newcomer: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = newcomer.post(path, json=body)
    assert refused.status_code == 400
    assert "may take" in refused.json()["error"]["message"]
    left = int(newcomer.post("/tokenize", json={"prompt": "x"}).headers["x-ratelimit-remaining-tokens"])
    assert left == FRUGAL  # nothing was done


def test_a_refused_prompt_costs_what_it_took_to_see_that(newcomer: httpx.Client) -> None:
    text = WORDS[:100_000]
    refused = newcomer.post("/v1/completions", json={"model": SMOLLM2, "prompt": text})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    left = int(newcomer.post("/tokenize", json={"prompt": "x"}).headers["x-ratelimit-remaining-tokens"])
    assert FRUGAL - len(text) // 16 < left <= FRUGAL - len(text) // 160


def test_as_many_prompts_are_answered_as_the_queue_holds_and_one_more_is_refused_unread(client: httpx.Client) -> None:
    body = {"model": SMOLLM2, "prompt": ["x"] * 256, "max_tokens": 1}
    told = client.post("/v1/completions", json=body)
    assert told.status_code == 200, told.text
    assert len(told.json()["choices"]) == 256
    refused = client.post("/v1/completions", json=body | {"prompt": ["x"] * 257})
    assert refused.status_code == 400
    assert "257 answers" in refused.json()["error"]["message"]


class TestCounting:
    def test_counts_what_no_context_would_hold_and_charges_its_bytes(self, newcomer: httpx.Client) -> None:
        numbers = []
        for text in (WORDS[:60_000], WORDS[:60_000] * 2):
            body = {"model": SMOLLM2, "messages": [{"role": "user", "content": text}]}
            told = newcomer.post(COUNT, json=body)
            assert told.status_code == 200, told.text
            numbers.append(told.json()["input_tokens"])
        assert numbers[0] > 4 * 2048
        assert abs(numbers[1] - 2 * numbers[0]) < 100
        charged = FRUGAL - int(told.headers["x-ratelimit-remaining-tokens"])
        assert 0.99 * 180_000 / 160 <= charged < 180_000 // 16

    def test_compiles_nothing(self, server: ServerProcess, client: httpx.Client) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 10_000_019}}}
        tool = {"name": "t", "input_schema": schema}
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": SMOLLM2, "messages": messages, "tools": [tool], "tool_choice": {"type": "any"}}
        before = num_compiled(server)
        assert client.post(COUNT, json=body).json()["input_tokens"] > 10
        assert num_compiled(server) == before


def num_compiled(server: ServerProcess) -> float:
    return read(scrape(server), "kvarn_grammar_compilation_time_seconds_count")


class TestPdfs:
    def test_cost_a_token_for_a_kibibyte_and_their_text(self, keyed: KeyedServer) -> None:
        """The tier allows 120 tokens a minute."""
        key = keyed.add("pdfs", "few_tokens")
        with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
            until(lambda: client.post("/v1/collections", json={"name": "pdfs"}).status_code == 200)
            refused = client.post("/v1/collections/pdfs/documents", json=pdf(125 * 1024))
            assert refused.status_code == 400
            assert "may take 12" in refused.json()["error"]["message"]
            taken = client.post("/v1/collections/pdfs/documents", json=pdf(100 * 1024))
            assert taken.status_code == 200, taken.text
            assert client.delete("/v1/collections/pdfs").status_code == 200
        keyed.remove("pdfs")


def pdf(num_bytes: int) -> dict[str, Any]:
    """One page of a few words in a file that is, in base64, of this size."""
    page = make_pdf("Peacocks dance")
    padded = page + b"\n%" + b"x" * (num_bytes * 3 // 4 - len(page) - 2)
    return {"documents": [{"kind": "pdf", "data": base64.b64encode(padded).decode()}]}


def test_arguments_of_calls_take_little_memory_to_be_written(server: ServerProcess, client: httpx.Client) -> None:
    """This model's template has no place for calls, so that their text is written; see test_template for the others."""
    values = ",".join(f'"v{number}"' for number in range(400_000))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"x": [{values}]}}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    num_bytes = len(values)
    assert client.post("/apply-template", json={"messages": messages[:1]}).status_code == 200
    before = peak_bytes(server)
    for _ in range(3):
        assert client.post("/apply-template", json={"messages": messages}).status_code == 200
    assert peak_bytes(server) - before < 16 * num_bytes


def peak_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
