"""The official clients, unchanged, against a real server: what their users do on the first day."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model

QUESTION = "Name one color of the sky."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def open_ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


class TestOpenAI:
    def test_chat_answers(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.chat.completions.create(model=SMOLLM2, messages=user(QUESTION), max_tokens=12, temperature=0)
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_a_streamed_chat_adds_up_to_the_whole_one(self, open_ai: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": SMOLLM2, "messages": user(QUESTION), "max_tokens": 12, "temperature": 0}
        whole = open_ai.chat.completions.create(**asked)
        chunks = list(open_ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert told == whole.choices[0].message.content
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [whole.usage.completion_tokens]

    def test_a_required_tool_is_called_with_arguments_that_follow_its_schema(self, open_ai: openai.OpenAI) -> None:
        function = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
        answer = open_ai.chat.completions.create(
            model=SMOLLM2,
            messages=user("What is the weather in Paris?"),
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=60,
            temperature=0,
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.name == "weather"
        follows(json.loads(call.function.arguments))
        assert answer.choices[0].finish_reason == "tool_calls"

    def test_the_streaming_helper_puts_a_tool_call_together(self, open_ai: openai.OpenAI) -> None:
        function = {"name": "weather", "parameters": SCHEMA}
        with open_ai.chat.completions.stream(
            model=SMOLLM2,
            messages=user("What is the weather in Oslo?"),
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=60,
            temperature=0,
        ) as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        follows(json.loads(call.function.arguments))

    def test_a_tool_result_goes_back_to_the_model(self, open_ai: openai.OpenAI) -> None:
        function = {"name": "weather", "arguments": '{"city": "Oslo", "warm": false}'}
        messages: Any = [
            *user("Is it warm in Oslo?"),
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It snows."},
        ]
        answer = open_ai.chat.completions.create(model=SMOLLM2, messages=messages, max_tokens=12, temperature=0)
        assert answer.choices[0].message.content

    def test_a_json_schema_is_followed(self, open_ai: openai.OpenAI) -> None:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
        answer = open_ai.chat.completions.create(
            model=SMOLLM2, messages=user("Where is it warm?"), response_format=wanted, max_tokens=60, temperature=0
        )
        follows(json.loads(answer.choices[0].message.content or ""))

    def test_parse_gives_an_object_of_the_callers_class(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.chat.completions.parse(
            model=SMOLLM2, messages=user("Is Paris warm?"), response_format=Verdict, max_tokens=60, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, Verdict)

    def test_logprobs_come_for_every_token(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.chat.completions.create(
            model=SMOLLM2, messages=user(QUESTION), max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
        )
        scores = answer.choices[0].logprobs
        assert scores is not None
        assert scores.content is not None
        assert len(scores.content) == answer.usage.completion_tokens  # type: ignore[union-attr]
        for token in scores.content:
            assert token.logprob == max(one.logprob for one in token.top_logprobs)  # greedy takes the best
            assert len(token.top_logprobs) == 3

    def test_closing_a_stream_cancels_the_request(
        self, open_ai: openai.OpenAI, server: ServerProcess, patience: float
    ) -> None:
        stream = open_ai.chat.completions.create(
            model=SMOLLM2, messages=user("Count to a thousand."), max_tokens=1500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        first = next(iter(stream))
        stream.close()
        wait_until_ended(server, first.id, 5 * patience)

    def test_a_text_completion_echoes_its_prompt(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.completions.create(model=SMOLLM2, prompt="Two and two", max_tokens=4, temperature=0, echo=True)
        assert answer.choices[0].text.startswith("Two and two")

    def test_embeddings_are_near_for_near_texts(self, open_ai: openai.OpenAI) -> None:
        texts = ["a cat sleeps", "a kitten naps", "stock markets fell"]
        answer = open_ai.embeddings.create(model=MINILM, input=texts)  # the client asks for base64 by itself
        cat, kitten, stocks = (one.embedding for one in answer.data)
        assert dot(cat, cat) == pytest.approx(1.0, abs=1e-5)
        assert dot(cat, kitten) > dot(cat, stocks) + 0.2
        assert answer.usage.prompt_tokens > 10

    def test_models_are_listed_and_found(self, open_ai: openai.OpenAI) -> None:
        assert [card.id for card in open_ai.models.list()] == [SMOLLM2, MINILM]
        assert open_ai.models.retrieve(MINILM).owned_by == "kvarn"
        with pytest.raises(openai.NotFoundError, match="no model here is called"):
            open_ai.models.retrieve("gpt-4")

    def test_a_response_answers(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.responses.create(
            model=SMOLLM2, instructions="Answer briefly.", input=QUESTION, max_output_tokens=12, temperature=0
        )
        assert answer.output_text
        assert answer.usage is not None
        assert answer.usage.output_tokens <= 12

    def test_a_streamed_response_ends_with_the_whole_one(self, open_ai: openai.OpenAI) -> None:
        with open_ai.responses.stream(model=SMOLLM2, input="Hi", max_output_tokens=60, temperature=0) as stream:
            told = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(told) == final.output_text
        assert final.status == "completed"

    def test_a_response_calls_a_function_and_reads_its_output(self, open_ai: openai.OpenAI) -> None:
        tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
        asked: list[Any] = [{"role": "user", "content": "Is it warm in Paris?"}]
        first = open_ai.responses.create(
            model=SMOLLM2, input=asked, tools=[tool], tool_choice="required", parallel_tool_calls=False,
            max_output_tokens=60, temperature=0,
        )  # fmt: skip
        (call,) = [item for item in first.output if item.type == "function_call"]
        follows(json.loads(call.arguments))
        asked += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "25 degrees"}]
        second = open_ai.responses.create(model=SMOLLM2, input=asked, tools=[tool], max_output_tokens=12, temperature=0)
        assert second.output

    def test_responses_parse_gives_an_object_of_the_callers_class(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.responses.parse(
            model=SMOLLM2, input="Is Oslo warm?", text_format=Verdict, max_output_tokens=60, temperature=0
        )
        assert isinstance(answer.output_parsed, Verdict)

    def test_errors_are_the_clients_own(self, open_ai: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            open_ai.chat.completions.create(model=SMOLLM2, messages=user("Hi"), temperature=-1)
        assert refused.value.param == "temperature"


class TestAnthropic:
    def test_a_message_is_answered(self, claude: anthropic.Anthropic) -> None:
        answer = claude.messages.create(
            model=SMOLLM2, system="Answer briefly.", messages=user(QUESTION), max_tokens=12,
            extra_body={"temperature": 0},
        )  # fmt: skip
        (block,) = answer.content
        assert block.type == "text"
        assert block.text
        assert answer.usage.output_tokens <= 12

    def test_a_streamed_message_adds_up_to_the_whole_one(self, claude: anthropic.Anthropic) -> None:
        asked: dict[str, Any] = {"model": SMOLLM2, "messages": user(QUESTION), "max_tokens": 12}
        asked["extra_body"] = {"temperature": 0}
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            told = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert told == text_of(whole) == text_of(final)
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens

    def test_a_tool_is_used_and_its_result_read(self, claude: anthropic.Anthropic) -> None:
        tools: Any = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
        asked: list[Any] = user("Is it warm in Paris?")
        choice: Any = {"type": "tool", "name": "weather"}
        first = claude.messages.create(
            model=SMOLLM2, messages=asked, tools=tools, tool_choice=choice, max_tokens=60, extra_body={"temperature": 0}
        )
        (use,) = [block for block in first.content if block.type == "tool_use"]
        follows(use.input)
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "25 degrees"}
        asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = claude.messages.create(model=SMOLLM2, messages=asked, tools=tools, max_tokens=12)
        assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens

    def test_a_tool_use_streams_as_json(self, claude: anthropic.Anthropic) -> None:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        with claude.messages.stream(
            model=SMOLLM2, messages=user("Is Oslo warm?"), tools=tools, tool_choice=choice, max_tokens=60
        ) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        (use,) = [block for block in final.content if block.type == "tool_use"]
        follows(use.input)
        assert json.loads("".join(pieces)) == use.input

    def test_an_output_format_gives_an_object_of_the_callers_class(self, claude: anthropic.Anthropic) -> None:
        answer = claude.messages.parse(
            model=SMOLLM2, messages=user("Is Oslo warm?"), max_tokens=60, output_format=Verdict
        )
        assert isinstance(answer.parsed_output, Verdict)

    def test_tokens_are_counted_as_they_are_read(self, claude: anthropic.Anthropic) -> None:
        asked: dict[str, Any] = {"model": SMOLLM2, "system": "Be brief.", "messages": user(QUESTION)}
        counted = claude.messages.count_tokens(**asked)
        usage = claude.messages.create(**asked, max_tokens=1).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def test_models_are_listed_and_found(self, claude: anthropic.Anthropic) -> None:
        assert [card.id for card in claude.models.list()] == [SMOLLM2, MINILM]
        assert claude.models.retrieve(SMOLLM2).display_name == SMOLLM2

    def test_leaving_a_stream_cancels_the_request(
        self, claude: anthropic.Anthropic, server: ServerProcess, patience: float
    ) -> None:
        with claude.messages.stream(
            model=SMOLLM2, messages=user("Write a very long story about a mill."), max_tokens=1500
        ) as stream:
            next(iter(stream.text_stream))
            message_id = stream.current_message_snapshot.id
        wait_until_ended(server, message_id, 5 * patience)

    def test_errors_are_the_clients_own(self, claude: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            claude.messages.create(model="claude", messages=user("Hi"), max_tokens=1)
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            claude.messages.create(model=SMOLLM2, messages=user("Hi"), max_tokens=0)


class Verdict(BaseModel):
    """What the model shall say."""

    warm: bool


def follows(value: Any) -> None:
    assert set(value) == {"city", "warm"}
    assert value["city"] in ("Paris", "Oslo")
    assert isinstance(value["warm"], bool)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def wait_until_ended(server: ServerProcess, request_id: str, timeout_s: float) -> None:
    """The server forgets a request when it has ended."""
    deadline = time.monotonic() + timeout_s
    with server.client() as http:
        while http.get(f"/v1/requests/{request_id}").status_code != httpx.codes.NOT_FOUND:
            assert time.monotonic() < deadline, "the request still runs"
            time.sleep(0.05)
