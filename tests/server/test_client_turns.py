"""What the official clients' helpers return is sent back as the next turn, as objects and as what they dump."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.client_tasks import SCHEMA, Verdict, user
from tests.server.process import SMOLLM2, ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")]  # the clients' own
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
ASKED = user("Is it warm in Oslo?")


class Place(BaseModel):
    """Where to look."""

    warm: bool


@pytest.fixture(scope="module")
def open_ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_turn_in_which_the_model_said_nothing_is_an_empty_one(open_ai: openai.OpenAI) -> None:
    told = [answer_after(open_ai, **turn) for turn in ({"content": ""}, {"content": None}, {}, {"tool_calls": None})]
    assert told == told[:1] * 4


def test_a_refusal_is_what_the_model_said(open_ai: openai.OpenAI) -> None:
    said = "I cannot do that."
    part = {"type": "refusal", "refusal": said}
    turns: list[dict[str, Any]] = [{"content": said}, {"content": [part]}, {"content": None, "refusal": said}]
    told = [answer_after(open_ai, **turn) for turn in turns]
    assert told == told[:1] * 3
    assert told[0] != answer_after(open_ai, content="")
    item = {"type": "message", "role": "assistant", "content": [part]}
    plain = {"role": "assistant", "content": said}
    responses = [
        open_ai.responses.create(
            model=SMOLLM2, input=[*ASKED, one, *ASKED], temperature=0, max_output_tokens=8
        ).output_text
        for one in (plain, item)
    ]
    assert responses[0] == responses[1] == told[0]


def answer_after(client: openai.OpenAI, **turn: Any) -> str | None:
    """What is said after a turn of the assistant between two of the user."""
    messages: Any = [*ASKED, {"role": "assistant", **turn}, *ASKED]
    answer = client.chat.completions.create(model=SMOLLM2, messages=messages, max_tokens=8, temperature=0)
    return answer.choices[0].message.content


class TestChat:
    def test_a_streamed_call_goes_back(self, open_ai: openai.OpenAI) -> None:
        with open_ai.chat.completions.stream(
            model=SMOLLM2, messages=ASKED, tools=[{"type": "function", "function": FUNCTION}],  # type: ignore[typeddict-item]
            tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=0,
        ) as stream:  # fmt: skip
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls
        goes_back(open_ai, message, message.tool_calls[0].id)

    def test_a_parsed_answer_goes_back(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.chat.completions.parse(
            model=SMOLLM2, messages=ASKED, response_format=Verdict, max_tokens=60, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, Verdict)
        goes_back(open_ai, answer.choices[0].message)

    def test_a_parsed_call_goes_back(self, open_ai: openai.OpenAI) -> None:
        answer = open_ai.chat.completions.parse(
            model=SMOLLM2, messages=ASKED, tools=[openai.pydantic_function_tool(Place)], tool_choice="required",
            parallel_tool_calls=False, max_tokens=60, temperature=0,
        )  # fmt: skip
        message = answer.choices[0].message
        assert message.tool_calls
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Place)
        goes_back(open_ai, message, message.tool_calls[0].id)

    def test_marks_for_a_prompt_cache_have_no_effect(self, open_ai: openai.OpenAI) -> None:
        marked: Any = {"type": "text", "text": ASKED[0]["content"], "prompt_cache_breakpoint": {"mode": "explicit"}}
        told = [
            open_ai.chat.completions.create(
                model=SMOLLM2, messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
            )
            .choices[0]
            .message.content
            for content in (ASKED[0]["content"], [marked])
        ]
        assert told[0] == told[1]
        answer = open_ai.chat.completions.with_raw_response.create(
            model=SMOLLM2, messages=ASKED, max_tokens=4, extra_body={"prompt_cache_options": {"mode": "explicit"}}
        )
        assert answer.headers["x-kvarn-warning"] == "ignored: prompt_cache_options"


class TestResponses:
    def test_a_call_goes_back_as_the_client_dumps_it(self, open_ai: openai.OpenAI) -> None:
        tool: Any = {"type": "function", **FUNCTION, "strict": True}
        first = open_ai.responses.create(
            model=SMOLLM2, input=ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False,
            max_output_tokens=60, temperature=0,
        )  # fmt: skip
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It snows."}
        for by_alias in (True, False):
            dumped: Any = [item.model_dump(by_alias=by_alias) for item in first.output]
            again = [*ASKED, *dumped, result]
            assert open_ai.responses.create(model=SMOLLM2, input=again, max_output_tokens=4, temperature=0).output

    def test_a_parsed_answer_goes_back(self, open_ai: openai.OpenAI) -> None:
        first = open_ai.responses.parse(
            model=SMOLLM2, input=ASKED, text_format=Verdict, max_output_tokens=60, temperature=0
        )
        assert isinstance(first.output_parsed, Verdict)
        for said in (list(first.output), [item.model_dump(by_alias=True) for item in first.output]):
            again: Any = [*ASKED, *said, *user("Why?")]
            assert open_ai.responses.create(model=SMOLLM2, input=again, max_output_tokens=4, temperature=0).output


class TestMessages:
    def test_a_tool_use_goes_back_as_the_client_dumps_it(self, claude: anthropic.Anthropic) -> None:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        first = claude.messages.create(
            model=SMOLLM2, messages=ASKED, tools=tools, tool_choice={"type": "any"}, max_tokens=60
        )
        uses = [block.id for block in first.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": "It snows."} for use in uses]
        dumped = [block.model_dump() for block in first.content]
        again: Any = [*ASKED, {"role": "assistant", "content": dumped}, {"role": "user", "content": results}]
        assert claude.messages.create(model=SMOLLM2, messages=again, tools=tools, max_tokens=4).content

    def test_a_parsed_answer_goes_back(self, claude: anthropic.Anthropic) -> None:
        first = claude.messages.parse(model=SMOLLM2, messages=ASKED, max_tokens=60, output_format=Verdict)
        for said in (first.content, [block.model_dump() for block in first.content]):
            again: Any = [*ASKED, {"role": "assistant", "content": said}, *user("Why?")]
            assert claude.messages.create(model=SMOLLM2, messages=again, max_tokens=4).usage.output_tokens

    def test_the_tool_runner_does_without_the_thread_it_asks_for(self, claude: anthropic.Anthropic) -> None:
        calls: list[bool] = []

        @anthropic.beta_tool
        def weather(warm: bool) -> str:
            """Tell whether it is warm.

            Args:
                warm: what the caller guesses
            """
            calls.append(warm)
            return "It snows."

        runner = claude.beta.messages.tool_runner(
            model=SMOLLM2, messages=ASKED, tools=[weather], tool_choice={"type": "tool", "name": "weather"},
            max_tokens=60, max_iterations=2,
        )  # fmt: skip
        final = runner.until_done()
        assert final.usage.output_tokens
        assert calls


def goes_back(client: openai.OpenAI, message: Any, call_id: str | None = None) -> None:
    """A message of the assistant is read again, and the result of its call or a question after it."""
    after: Any = {"role": "user", "content": "Why?"}
    if call_id is not None:
        after = {"role": "tool", "tool_call_id": call_id, "content": "It snows."}
    for said in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        asked: Any = [*ASKED, said, after]
        answer = client.chat.completions.create(model=SMOLLM2, messages=asked, max_tokens=4, temperature=0)
        assert answer.usage
        assert answer.usage.completion_tokens
