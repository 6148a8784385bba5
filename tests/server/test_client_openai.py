"""The official OpenAI client, unchanged, against a real server: what its users do on the first day."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.client_tasks import QUESTION, SCHEMA, Verdict, follows, user, wait_until_ended
from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def open_ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


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


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
