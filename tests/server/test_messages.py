"""/v1/messages: bodies become chats, answers become Anthropic's events; then both over a real socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from kvarn.server.api.anthropic.message_stream import MessageStream
from kvarn.server.api.anthropic.schema import MessagesBody, ThinkingOff, ThinkingOn
from kvarn.server.api.anthropic.translation import chat_fields, chat_messages, thinking_kwargs
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from kvarn.types import FinishReason, Usage
from tests.server.process import SMOLLM2
from tests.server.sse import events

USAGE = Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16)
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
DELTAS: tuple[Delta, ...] = (
    ReasoningDelta("Let me"),
    ReasoningDelta(" see."),
    ContentDelta("I will"),
    ContentDelta(" look."),
    ToolCallStart(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallStart(1, "call_b", "time"),
    ToolCallArguments(1, "{}"),
)


def body(*messages: Any, **fields: Any) -> MessagesBody:
    return MessagesBody.model_validate({"model": "m", "max_tokens": 5, "messages": list(messages), **fields})


def says(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


class TestConversation:
    def test_the_system_prompt_stands_first(self) -> None:
        parts = [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ]
        messages = chat_messages(body({"role": "user", "content": "Hi"}, system=parts))
        assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    def test_tool_results_are_messages_of_their_own_in_the_order_they_were_said(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "cold"}]}
        failed = {"type": "tool_result", "tool_use_id": "b", "content": "no such city", "is_error": True}
        calls = [{"type": "tool_use", "id": one, "name": "weather", "input": {}} for one in ("a", "b")]
        turns = (says(*calls, role="assistant"), says(result, failed, {"type": "text", "text": "So?"}))
        assert chat_messages(body(*turns))[1:] == [
            {"role": "tool", "tool_call_id": "a", "content": "cold"},
            {"role": "tool", "tool_call_id": "b", "content": "error: no such city"},
            {"role": "user", "content": "So?"},
        ]

    def test_turns_of_one_role_that_follow_each_other_are_one(self) -> None:
        calls = [says({"type": "tool_use", "id": one, "name": "f", "input": {}}, role="assistant") for one in "ab"]
        asked = [{"role": "user", "content": "One."}, says({"type": "text", "text": "Two."})]
        first, second, third = chat_messages(body(*asked, *calls, {"role": "user", "content": "Well?"}))
        assert first == {"role": "user", "content": "One.\n\nTwo."}
        assert [call["id"] for call in second["tool_calls"]] == ["a", "b"]
        assert third == {"role": "user", "content": "Well?"}

    def test_a_result_without_its_call_is_named_by_its_place(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "a", "content": "cold"}
        with pytest.raises(InvalidField) as error:
            chat_messages(body(says({"type": "text", "text": "Hi"}, result), system="Be brief."))
        assert error.value.field == "messages.0.content.1.tool_use_id"

    def test_a_turn_of_the_assistant_is_one_message(self) -> None:
        turn = says(
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Åre"}},
            role="assistant",
        )
        message = chat_messages(body({"role": "user", "content": "Hi"}, turn, {"role": "user", "content": "?"}))[1]
        function = {"name": "weather", "arguments": '{"city": "Åre"}'}
        assert message == {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }

    def test_a_begun_answer_is_refused(self) -> None:
        with pytest.raises(InvalidField, match="begun answer"):
            chat_messages(body({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}))

    @pytest.mark.parametrize(
        ("role", "block"),
        [
            ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
            ("user", {"type": "thinking", "thinking": "x"}),
            ("assistant", {"type": "tool_result", "tool_use_id": "a"}),
            ("system", {"type": "tool_result", "tool_use_id": "a"}),
        ],
    )
    def test_a_block_in_the_wrong_mouth_is_refused(self, role: str, block: dict[str, Any]) -> None:
        with pytest.raises(InvalidField, match=block["type"]):
            chat_messages(body(says(block, role=role), {"role": "user", "content": "Hi"}))

    @pytest.mark.parametrize(
        ("given", "wanted", "is_parallel"),
        [
            ({"type": "auto"}, "auto", True),
            ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
            ({"type": "none"}, "none", True),
            ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, True),
        ],
    )
    def test_tool_choices_have_their_counterparts(self, given: Any, wanted: Any, is_parallel: bool) -> None:
        fields = chat_fields(body({"role": "user", "content": "Hi"}, tools=[TOOL], tool_choice=given), {})
        assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (wanted, is_parallel)
        (tool,) = fields["tools"]
        assert tool["function"]["parameters"] == TOOL["input_schema"]

    def test_the_template_is_told_to_think_or_not_if_it_can_be_told(self) -> None:
        on, off = ThinkingOn(type="enabled"), ThinkingOff(type="disabled")
        knows = "{% if enable_thinking %}"
        assert thinking_kwargs(None, knows, can_think=True) == ({}, None)
        assert thinking_kwargs(on, knows, can_think=True) == ({"enable_thinking": True}, None)
        assert thinking_kwargs(off, knows, can_think=True) == ({"enable_thinking": False}, None)
        assert thinking_kwargs(on, "", can_think=True) == ({}, None)
        assert thinking_kwargs(off, "", can_think=False) == ({}, None)
        assert thinking_kwargs(ThinkingOn(type="adaptive"), knows, can_think=False) == ({}, None)
        for thinking, can_think, words in ((on, False, "does not reason"), (off, True, "always reasons")):
            kwargs, warning = thinking_kwargs(thinking, "", can_think=can_think)
            assert not kwargs
            assert words in (warning or "")


class TestStream:
    def test_blocks_open_and_close_in_order(self) -> None:
        told = tell(DELTAS)
        kinds = [event["type"].removeprefix("content_block_") for event in told]
        a_block = ["start", "delta", "delta", "stop"]
        assert kinds == [
            *("message_start", "ping"),
            *a_block, *a_block, *a_block, "start", "delta", "stop",
            *("message_delta", "message_stop"),
        ]  # fmt: skip
        assert [event["index"] for event in told if event["type"] == "content_block_start"] == [0, 1, 2, 3]

    def test_the_events_add_up_to_the_whole_message(self) -> None:
        stream = MessageStream("msg_1", "m", 20)
        for delta in DELTAS:
            stream.push(delta)
        whole = stream.message(FinishReason.STOP, 2, USAGE)
        assert added_up(tell(DELTAS)) == whole["content"]
        assert whole["content"] == [
            {"type": "thinking", "thinking": "Let me see.", "signature": ""},
            {"type": "text", "text": "I will look."},
            {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
        ]

    @pytest.mark.parametrize(
        ("reason", "match", "deltas", "wanted"),
        [
            (FinishReason.STOP, 2, DELTAS, ("tool_use", None)),
            (FinishReason.STOP, 2, DELTAS[:4], ("end_turn", None)),
            (FinishReason.STOP, "END", DELTAS[:4], ("stop_sequence", "END")),
            (FinishReason.LENGTH, None, DELTAS, ("max_tokens", None)),
            (FinishReason.STOP, "END", DELTAS[:6], ("stop_sequence", "END")),
            (FinishReason.STOP, 2, DELTAS[:6], ("end_turn", None)),
        ],
    )
    def test_the_reason_of_the_end_is_told(self, reason: FinishReason, match: Any, deltas: Any, wanted: Any) -> None:
        *_, delta, _ = tell(deltas, reason, match)
        assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == wanted

    def test_a_call_that_was_cut_off_has_an_empty_input(self) -> None:
        stream = MessageStream("msg_1", "m", 20)
        for delta in DELTAS[:6]:
            stream.push(delta)
        message = stream.message(FinishReason.STOP, "END", USAGE)
        assert message["content"][-1] == {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}

    def test_cached_tokens_are_counted_apart(self) -> None:
        usage = tell(DELTAS)[-2]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == USAGE.prompt_tokens
        assert usage["cache_read_input_tokens"] == USAGE.cached_tokens
        assert usage["output_tokens"] == USAGE.completion_tokens

    def test_an_answer_of_nothing_has_no_blocks(self) -> None:
        assert [event["type"] for event in tell([ContentDelta("")])] == [
            *("message_start", "ping", "message_delta", "message_stop")
        ]


def tell(deltas: Sequence[Delta], reason: FinishReason = FinishReason.STOP, match: Any = None) -> list[dict[str, Any]]:
    stream = MessageStream("msg_1", "m", 20)
    return [*stream.start(), *(e for delta in deltas for e in stream.push(delta)), *stream.end(reason, match, USAGE)]


def added_up(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as a client puts it together."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in told:
        match event["type"], event.get("delta", {}).get("type"):
            case "content_block_start", _:
                blocks.append(dict(event["content_block"]))
            case "content_block_delta", "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_delta", kind:
                name = kind.removesuffix("_delta")
                blocks[event["index"]][name] += event["delta"][name]
    for index, written in inputs.items():
        blocks[index]["input"] = json.loads(written)
    return blocks


@pytest.mark.model
class TestServer:
    def test_a_stream_adds_up_to_the_whole_message(self, client: httpx.Client) -> None:
        asked = request("Name a color.", temperature=0, max_tokens=10, system="Be brief.")
        whole = client.post("/v1/messages", json=asked).json()
        with client.stream("POST", "/v1/messages", json={**asked, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            told = list(events(answer))
        assert added_up(told) == whole["content"]
        assert told[0]["message"]["id"].startswith("msg_")
        assert told[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]

    def test_events_have_names_as_well_as_types(self, client: httpx.Client) -> None:
        lines = client.post("/v1/messages", json=request("Hi", max_tokens=2, stream=True)).text.splitlines()
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        types = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
        assert names == types

    def test_a_stop_sequence_is_named_and_not_part_of_the_text(self, client: httpx.Client) -> None:
        free = client.post("/v1/messages", json=request("Count: one, two", temperature=0, max_tokens=16)).json()
        stop = free["content"][0]["text"][4:7]
        asked = request("Count: one, two", temperature=0, max_tokens=16, stop_sequences=[stop])
        stopped = client.post("/v1/messages", json=asked).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
        assert stopped["content"][0]["text"] == free["content"][0]["text"].partition(stop)[0]

    def test_a_stop_sequence_within_a_call_leaves_an_empty_input(self, client: httpx.Client) -> None:
        asked = request("Oslo?", max_tokens=60, stop_sequences=["city"], **forced({"enum": ["Oslo", "Paris"]}))
        told = client.post("/v1/messages", json=asked).json()
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "city")
        assert [(block["type"], block["input"]) for block in told["content"]] == [("tool_use", {})]

    def test_a_call_with_a_character_that_is_not_taken_back_is_mended(self, client: httpx.Client) -> None:
        asked = request("Oslo?", max_tokens=60, **forced({"type": "string", "pattern": r"^a\x00b$"}))
        told = client.post("/v1/messages", json=asked).json()
        assert [block["input"] for block in told["content"]] == [{"city": "a\ufffdb"}]
        with client.stream("POST", "/v1/messages", json={**asked, "stream": True}) as answer:
            assert [block["input"] for block in added_up(list(events(answer)))] == [{"city": "a\ufffdb"}]
        result = says({"type": "tool_result", "tool_use_id": told["content"][0]["id"], "content": "cold"})
        history = [*asked["messages"], {"role": "assistant", "content": told["content"]}, result]
        again = client.post("/v1/messages", json={**asked, "messages": history})
        assert again.status_code == 200, again.text

    def test_inert_fields_do_not_change_the_answer(self, client: httpx.Client) -> None:
        asked = request("Name a color.", temperature=0, max_tokens=6)
        plain = client.post("/v1/messages", json=asked).json()
        decorated = {**asked, "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
        assert client.post("/v1/messages", json=decorated).json()["content"] == plain["content"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
            ({"messages": [says({"type": "tool_result", "tool_use_id": "x"})]}, "call"),
            ({"temperature": -1}, "temperature"),
            ({"top_k": 1.5}, "top_k"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
            ({"tools": [TOOL] * 129}, "tools"),
            ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
            ({"tool_choice": {"type": "tool", "name": "none"}}, "tool"),
            ({"mcp_servers": [{}]}, "mcp_servers"),
            ({"container": "c"}, "container"),
            ({"output_config": {"effort": "utmost"}}, "output_config.effort"),
            ({"colour": "blue"}, "colour"),
        ],
        ids=str,
    )
    def test_what_cannot_be_honoured_is_refused_by_name_in_anthropics_shape(
        self, client: httpx.Client, change: dict[str, Any], words: str
    ) -> None:
        answer = client.post("/v1/messages", json={**request("Hi"), **change})
        assert answer.status_code == 400, answer.text
        told = answer.json()
        assert told["type"] == "error"
        assert told["error"]["type"] == "invalid_request_error"
        assert words in told["error"]["message"]

    def test_an_unknown_model_is_not_found(self, client: httpx.Client) -> None:
        answer = client.post("/v1/messages", json=request("Hi", model="claude"))
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"

    def test_counting_needs_no_max_tokens_and_counts_tools(self, client: httpx.Client) -> None:
        asked = {"model": SMOLLM2, "messages": [{"role": "user", "content": "Hi"}]}
        bare = client.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"]
        armed = client.post("/v1/messages/count_tokens", json={**asked, "tools": [TOOL]}).json()["input_tokens"]
        assert 0 < bare < armed
        refused = client.post("/v1/messages/count_tokens", json={**asked, "stream": True})
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"


def request(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": SMOLLM2, "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}


def forced(city: dict[str, Any]) -> dict[str, Any]:
    """Fields that make the model call a tool with a city."""
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {**TOOL, "input_schema": schema}
    return {"tools": [tool], "tool_choice": {"type": "tool", "name": TOOL["name"]}, "temperature": 0}
