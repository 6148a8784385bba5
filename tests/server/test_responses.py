"""/v1/responses: bodies become chats, answers become numbered events; then both over a real socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvarn.server.api.responses.echo import echo_of
from kvarn.server.api.responses.response_stream import ResponseStream, ResponseUsage
from kvarn.server.api.responses.schema import ResponsesBody
from kvarn.server.api.responses.translation import chat_fields, chat_messages
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from kvarn.types import FinishReason, Usage
from tests.server.process import SMOLLM2
from tests.server.sse import events

USAGE = ResponseUsage(Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16), 3)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
DELTAS: tuple[Delta, ...] = (
    ReasoningDelta("Let me"),
    ReasoningDelta(" see."),
    ContentDelta("I will"),
    ContentDelta(" look."),
    ToolCallStart(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Oslo"}'),
)


def body(given: Any, **fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "m", "input": given, **fields})


class TestConversation:
    def test_a_text_is_a_message_of_the_user_after_the_instructions(self) -> None:
        assert chat_messages(body("Hi", instructions="Be brief.")) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]

    def test_items_that_came_out_go_back_in_as_one_turn_of_the_assistant(self) -> None:
        output = added_up(tell(DELTAS))["output"]
        answered = {"type": "function_call_output", "call_id": "call_a", "output": "cold"}
        question = {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]}
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert chat_messages(body([question, *output, answered])) == [
            {"role": "user", "content": "Oslo?"},
            {
                "role": "assistant",
                "content": "I will look.",
                "reasoning_content": "Let me see.",
                "tool_calls": [{"id": "call_a", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_a", "content": "cold"},
        ]

    def test_two_texts_of_the_assistant_are_two_messages(self) -> None:
        texts = [{"role": "assistant", "content": text} for text in ("one", "two")]
        assert chat_messages(body([*texts, {"role": "user", "content": "?"}]))[:2] == texts

    def test_an_output_without_its_call_is_named_by_its_place(self) -> None:
        output = {"type": "function_call_output", "call_id": "a", "output": "cold"}
        with pytest.raises(InvalidField) as error:
            chat_messages(body([{"role": "user", "content": "?"}, output], instructions="Be brief."))
        assert error.value.field == "input.1.call_id"

    def test_formats_tools_and_choices_have_their_counterparts(self) -> None:
        wanted = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
        fields = chat_fields(body("Hi", text=wanted, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}))
        assert fields["response_format"]["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}
        assert fields["tools"] == [
            {"type": "function", "function": {"name": "weather", "parameters": TOOL["parameters"]}}
        ]
        assert fields["tool_choice"] == {"type": "function", "function": {"name": "weather"}}

    def test_scores_are_asked_for_by_number_or_by_include(self) -> None:
        assert "logprobs" not in chat_fields(body("Hi"))
        assert chat_fields(body("Hi", top_logprobs=2))["logprobs"] is True
        assert chat_fields(body("Hi", include=["message.output_text.logprobs"]))["logprobs"] is True


class TestStream:
    def test_events_are_numbered_and_are_what_the_official_client_declares(self) -> None:
        told = tell(DELTAS)
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        declared: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        for event in told:
            assert declared.validate_python(event).type == event["type"]

    def test_every_item_is_added_told_and_done(self) -> None:
        kinds = [event["type"].removeprefix("response.") for event in tell(DELTAS)]
        part = ("content_part.added", "content_part.done")
        assert kinds == [
            *("created", "in_progress"),
            *("output_item.added", part[0], "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
            *(part[1], "output_item.done"),
            *("output_item.added", part[0], "output_text.delta", "output_text.delta", "output_text.done"),
            *(part[1], "output_item.done"),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done"),
            "completed",
        ]

    def test_the_last_event_has_what_the_others_add_up_to(self) -> None:
        told = tell(DELTAS)
        last = told[-1]["response"]
        assert last["output"] == added_up(told)["output"]
        assert Response.model_validate(last).output_text == "I will look."
        assert [item["status"] for item in last["output"]] == ["completed"] * 3
        assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}

    def test_an_answer_that_was_cut_off_is_incomplete(self) -> None:
        *_, item, last = tell(DELTAS[:4], FinishReason.LENGTH)
        assert item["item"]["status"] == "incomplete"
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["completed_at"] is None

    def test_a_failure_is_the_last_event(self) -> None:
        stream = new_stream()
        stream.start()
        (failed,) = stream.fail("internal_error", "it broke")
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"] == {"code": "internal_error", "message": "it broke"}
        assert failed["sequence_number"] == 2

    @pytest.mark.parametrize("num_deltas", [2, 4, 6])
    def test_a_failure_leaves_the_open_item_incomplete(self, num_deltas: int) -> None:
        stream = new_stream()
        for delta in DELTAS[:num_deltas]:
            stream.push(delta)
        (failed,) = stream.fail("internal_error", "it broke")
        *earlier, last = (item["status"] for item in failed["response"]["output"])
        assert set(earlier) <= {"completed"}
        assert last == "incomplete"

    def test_scores_go_with_the_text(self) -> None:
        stream = new_stream()
        (*_, delta) = stream.push(ContentDelta("a"), [{"token": "a"}])
        assert delta["logprobs"] == [{"token": "a"}]
        stream.push(ContentDelta("bc"), [{"token": "b"}, {"token": "c"}])
        whole = stream.response(FinishReason.STOP, USAGE, 9)
        assert [one["token"] for one in whole["output"][0]["content"][0]["logprobs"]] == ["a", "b", "c"]


def new_stream(**fields: Any) -> ResponseStream:
    return ResponseStream(echo_of(body("Hi", tools=[TOOL], **fields), "resp_1", "m", 8))


def tell(deltas: Sequence[Delta], reason: FinishReason = FinishReason.STOP) -> list[dict[str, Any]]:
    stream = new_stream()
    return [*stream.start(), *(e for delta in deltas for e in stream.push(delta)), *stream.end(reason, USAGE, 9)]


def added_up(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The response as a client puts it together from all events but the last."""
    response = dict(told[0]["response"])
    response["output"] = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    for event in told:
        if event["type"].endswith((".delta", "arguments.delta")):
            assert event["item_id"] == response["output"][event["output_index"]]["id"]
    texts = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    if texts:
        (message,) = [item for item in response["output"] if item["type"] == "message"]
        assert message["content"][0]["text"] == "".join(texts)
    return response


@pytest.mark.model
class TestServer:
    def test_a_stream_ends_with_the_whole_response(self, client: httpx.Client) -> None:
        asked = request("Name a color.", max_output_tokens=10, top_logprobs=2)
        whole = client.post("/v1/responses", json=asked).json()
        with client.stream("POST", "/v1/responses", json={**asked, "stream": True}) as answer:
            told = list(events(answer))
        assert added_up(told)["output"] == told[-1]["response"]["output"]
        assert without_ids(told[-1]["response"]) == without_ids(whole)
        part = whole["output"][0]["content"][0]
        assert "".join(score["token"] for score in part["logprobs"]) == part["text"]
        assert all(len(score["top_logprobs"]) == 2 for score in part["logprobs"])

    def test_the_token_that_ends_an_answer_is_no_part_of_its_text(self, client: httpx.Client) -> None:
        asked = request("Say: yes", max_output_tokens=100, include=["message.output_text.logprobs"])
        told = client.post("/v1/responses", json=asked).json()
        part = told["output"][0]["content"][0]
        assert told["status"] == "completed"
        assert "".join(score["token"] for score in part["logprobs"]) == part["text"]
        assert len(part["logprobs"]) == told["usage"]["output_tokens"] - 1

    def test_the_response_repeats_what_was_understood(self, client: httpx.Client) -> None:
        asked = request("Hi", instructions="Be brief.", metadata={"a": "b"}, tools=[TOOL], top_p=0.9)
        asked |= {"tool_choice": "none", "store": False}
        told = client.post("/v1/responses", json=asked).json()
        assert (told["instructions"], told["metadata"], told["top_p"]) == ("Be brief.", {"a": "b"}, 0.9)
        assert told["tool_choice"] == "none"
        assert told["tools"][0]["name"] == "weather"
        assert told["store"] is False
        Response.model_validate(told)

    def test_a_schema_is_followed(self, client: httpx.Client) -> None:
        wanted = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}}
        told = client.post("/v1/responses", json=request("Is it ok?", max_output_tokens=40, text=wanted)).json()
        verdict = json.loads(told["output"][0]["content"][0]["text"])
        assert isinstance(verdict.pop("ok"), bool)
        assert verdict == {}

    def test_any_json_object_is_one(self, client: httpx.Client) -> None:
        asked = request('Write {"a": 1}', max_output_tokens=200, text={"format": {"type": "json_object"}})
        told = client.post("/v1/responses", json=asked).json()
        text = told["output"][0]["content"][0]["text"]
        assert text.startswith("{")
        assert told["status"] == "incomplete" or isinstance(json.loads(text), dict)

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
            ({"include": ["web_search_call.results"]}, "include.0"),
            ({"input": []}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
            ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
            ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 2**30}, "max_output_tokens"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"temperature": float("1e300")}, "temperature"),
            ({"colour": "blue"}, "colour"),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_cannot_be_honoured_is_refused_by_name(
        self, client: httpx.Client, change: dict[str, Any], param: str
    ) -> None:
        answer = client.post("/v1/responses", json={**request("Hi"), **change})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param

    def test_an_output_without_its_call_is_refused(self, client: httpx.Client) -> None:
        items = [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "call_id": "c", "output": "7"}]
        assert client.post("/v1/responses", json={**request("Hi"), "input": items}).status_code == 400

    def test_inert_fields_do_not_change_the_answer(self, client: httpx.Client) -> None:
        asked = request("Name a color.", max_output_tokens=6)
        inert = {"user": "u", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"}
        plain, decorated = (client.post("/v1/responses", json=one).json() for one in (asked, {**asked, **inert}))
        assert without_ids(plain) == without_ids(decorated)

    def test_an_unknown_model_is_not_found(self, client: httpx.Client) -> None:
        answer = client.post("/v1/responses", json=request("Hi", model="gpt-5"))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def request(question: str, /, **fields: Any) -> dict[str, Any]:
    return {"model": SMOLLM2, "max_output_tokens": 4, "temperature": 0, "input": question, **fields}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What must be the same when the same is asked twice; the second time more of the prompt is cached."""
    kept = {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at", "usage")}
    kept["output"] = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    return kept | {"total": response["usage"]["total_tokens"]}
