"""The official Anthropic client, unchanged, against a real server: what its users do on the first day."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.client_tasks import QUESTION, SCHEMA, Verdict, follows, user, wait_until_ended
from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


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

    def test_models_come_page_by_page_in_both_directions(self, claude: anthropic.Anthropic) -> None:
        page = claude.models.list(limit=1)
        assert [card.id for card in page.data] == [SMOLLM2]
        assert [card.id for card in page] == [SMOLLM2, MINILM]
        assert [card.id for card in claude.models.list(limit=1, before_id=MINILM)] == [SMOLLM2]

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


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
