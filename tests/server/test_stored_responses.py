"""Responses that the server keeps: continued by id, read again, forgotten; each key sees its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.asking import refusal
from tests.server.client_tasks import SCHEMA
from tests.server.edge_client import until
from tests.server.keyed import KeyedServer
from tests.server.process import SMOLLM2, ServerProcess, model_path

pytestmark = pytest.mark.model
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def open_ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: httpx.Client, text: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": SMOLLM2, "max_output_tokens": 6, "temperature": 0, "input": text, **fields}
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


class TestContinuing:
    def test_is_the_same_as_sending_the_whole_conversation(self, client: httpx.Client) -> None:
        first = ask(client, "Name a color.")
        second = ask(client, "Name another.", previous_response_id=first["id"])
        third = ask(client, "And one more.", previous_response_id=second["id"])
        turns: list[Any] = [{"role": "user", "content": "Name a color."}, *first["output"]]
        turns += [{"role": "user", "content": "Name another."}, *second["output"]]
        whole = ask(client, [*turns, {"role": "user", "content": "And one more."}], store=False)
        assert text_of(third) == text_of(whole)
        assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert third["previous_response_id"] == second["id"]

    def test_does_not_carry_instructions_over(self, client: httpx.Client) -> None:
        first = ask(client, "Hi", instructions="Answer like a pirate of the seven seas, and never briefly.")
        second = ask(client, "Hi", previous_response_id=first["id"])
        plain = ask(client, [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "Hi"}])
        assert second["usage"]["input_tokens"] == plain["usage"]["input_tokens"]

    def test_a_streamed_response_can_be_continued_as_soon_as_it_has_ended(self, open_ai: openai.OpenAI) -> None:
        *_, last = open_ai.responses.create(model=SMOLLM2, input="Name a color.", max_output_tokens=6, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        first = last.response
        second = open_ai.responses.create(
            model=SMOLLM2, input="Another.", previous_response_id=first.id, max_output_tokens=6
        )
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens

    def test_a_call_is_answered_by_its_output_alone(self, open_ai: openai.OpenAI) -> None:
        tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
        first = open_ai.responses.create(
            model=SMOLLM2, input="Is it warm in Oslo?", tools=[tool], tool_choice="required",
            parallel_tool_calls=False, max_output_tokens=60, temperature=0,
        )  # fmt: skip
        (call,) = [item for item in first.output if item.type == "function_call"]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It snows."}
        second = open_ai.responses.create(
            model=SMOLLM2, input=[output], previous_response_id=first.id, tools=[tool], max_output_tokens=8
        )
        assert second.output

    def test_items_are_referred_to_by_id(self, client: httpx.Client) -> None:
        first = ask(client, "Name a color.")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        turns = [{"role": "user", "content": "Name a color."}, reference]
        more = {"role": "user", "content": "Another."}
        by_id, whole = (ask(client, items) for items in ([*turns, more], [turns[0], *first["output"], more]))
        assert text_of(by_id) == text_of(whole)
        body = {"model": SMOLLM2, "input": [*turns[:1], {"type": "item_reference", "id": "msg_0_0"}, more]}
        assert refusal(client, PATH, body)["param"] == "input.1"

    def test_an_unknown_id_is_refused_as_openai_does(self, client: httpx.Client) -> None:
        error = refusal(client, PATH, {"model": SMOLLM2, "input": "Hi", "previous_response_id": "resp_0"})
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


class TestReading:
    def test_a_response_is_read_again_and_forgotten(self, open_ai: openai.OpenAI) -> None:
        made = open_ai.responses.create(model=SMOLLM2, input="Hi", max_output_tokens=4)
        assert open_ai.responses.retrieve(made.id) == made
        open_ai.responses.delete(made.id)
        for attempt in (open_ai.responses.retrieve, open_ai.responses.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(made.id)

    def test_what_shall_not_be_stored_is_not(self, client: httpx.Client) -> None:
        made = ask(client, "Hi", store=False)
        assert made["store"] is False
        assert client.get(f"{PATH}/{made['id']}").status_code == 404

    def test_input_items_are_the_conversation_page_by_page(self, open_ai: openai.OpenAI) -> None:
        first = open_ai.responses.create(model=SMOLLM2, input="Hi", max_output_tokens=4)
        second = open_ai.responses.create(
            model=SMOLLM2, input="Why?", previous_response_id=first.id, max_output_tokens=4
        )
        oldest_first = list(open_ai.responses.input_items.list(second.id, order="asc", limit=1))
        latest_first = list(open_ai.responses.input_items.list(second.id))
        assert [item.id for item in oldest_first] == [item.id for item in latest_first][::-1]
        texts = [item.content[0].text for item in oldest_first if item.type == "message"]  # type: ignore[union-attr]
        assert texts == ["Hi", first.output_text, "Why?"]

    @pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=no"])
    def test_a_page_that_cannot_be_is_refused(self, client: httpx.Client, query: str) -> None:
        made = ask(client, "Hi")
        assert client.get(f"{PATH}/{made['id']}/input_items?{query}").status_code == 400

    def test_a_key_sees_its_own_only(self, keyed: KeyedServer) -> None:
        with keyed.client("alice") as alice, keyed.client("anna") as anna, keyed.client(None) as nobody:
            made = ask(alice, "Hi")
            assert alice.get(f"{PATH}/{made['id']}").status_code == 200
            assert anna.get(f"{PATH}/{made['id']}").status_code == 404
            assert anna.delete(f"{PATH}/{made['id']}").status_code == 404
            assert nobody.get(f"{PATH}/{made['id']}").status_code == 401
            error = refusal(anna, PATH, {"model": SMOLLM2, "input": "Hi", "previous_response_id": made["id"]})
            assert error["code"] == "previous_response_not_found"


def test_a_file_keeps_responses_beyond_the_process(tmp_path: Path) -> None:
    file = tmp_path / "responses.sqlite"
    config = f'response_store = "{file}"\n'
    arguments = ("--model", f"tiny={model_path(SMOLLM2)}", "--context", "512")
    with ServerProcess(*arguments, config=config) as server, server.client() as client:
        made = ask(client, "Hi", model="tiny")
    assert file.stat().st_mode & 0o077 == 0
    with ServerProcess(*arguments, config=config) as server, server.client() as client:
        assert client.get(f"{PATH}/{made['id']}").json() == made
        assert ask(client, "Why?", model="tiny", previous_response_id=made["id"])["status"]
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny"]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_references_are_bounded_and_each_response_is_read_once(client: httpx.Client) -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 4000}], "summary": []}
    stored = ask(client, [thoughts, {"role": "user", "content": "Hi"}])
    item = client.get(f"{PATH}/{stored['id']}/input_items?order=asc").json()["data"][0]
    reference = {"type": "item_reference", "id": item["id"]}
    few = ask(client, [reference, {"role": "user", "content": "Hi"}])
    assert few["usage"]["input_tokens"] == stored["usage"]["input_tokens"]
    body = {"model": SMOLLM2, "input": [reference] * 1300 + [{"role": "user", "content": "Hi"}]}
    told = client.post(PATH, json=body)
    assert told.status_code == 400
    assert "more than 256 items" in told.json()["error"]["message"]


def test_another_key_of_the_same_name_gets_nothing(keyed: KeyedServer) -> None:
    """`keys rm` and `keys new`: the name is the same, whoever has the key may be another."""
    statuses = []
    for _ in range(2):
        key = keyed.add("namesake", "pro")
        with keyed.process.client(headers={"authorization": f"Bearer {key}"}) as client:
            until(lambda: client.get("/v1/models").status_code == 200)
            if not statuses:
                made = ask(client, "Hi")
            statuses.append(client.get(f"{PATH}/{made['id']}").status_code)
        keyed.remove("namesake")
    assert statuses == [200, 404]


def test_what_is_read_again_is_what_was_answered(client: httpx.Client) -> None:
    made = ask(client, "Hi")
    assert client.get(f"{PATH}/{made['id']}").json() == made
