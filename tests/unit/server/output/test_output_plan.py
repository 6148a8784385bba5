"""From the tools of a request to the prompt and to the reading of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.output.output_stream import AnswerContext
from kvarn.server.chat.output.tool_prompt import JSON_FORM, TOOL_PROMPT
from kvarn.server.chat.output.tools import NamedFunction
from kvarn.structured.constraints import Grammar, JsonSchema
from tests.rules.tree import ROOT
from tests.unit.server.output.texts import parse_output

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": {"type": "object"}}}
]
USER = {"role": "user", "content": "Hi"}
GENERIC = OutputFormat("json")
CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": i, "content": c} for i, c in (("a", "7 degrees"), ("b", "none"))]


class Letters:
    """A tokenizer whose ids are the characters."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        return "".join(map(chr, ids))


def test_a_template_that_knows_tools_is_given_them_and_the_messages_as_they_are() -> None:
    plan = OutputPlan.of(OutputFormat("hermes", shows_tools=True), TOOLS)
    assert plan.template_tools == TOOLS
    assert plan.messages([USER, CALLED, *RESULTS]) == [USER, CALLED, *RESULTS]


@pytest.mark.parametrize("shows_tools", [True, False])
def test_results_stand_in_the_order_of_their_calls(shows_tools: bool) -> None:
    """Templates write no ids: the first result would be read as that of the first call."""
    plan = OutputPlan.of(OutputFormat("hermes", shows_tools=shows_tools), TOOLS)
    said = {"role": "user", "content": "So?"}
    assert plan.messages([USER, CALLED, *RESULTS[::-1], said]) == plan.messages([USER, CALLED, *RESULTS, said])


def test_what_the_user_says_after_results_joins_them_where_they_are_his() -> None:
    messages = OutputPlan.of(GENERIC, TOOLS).messages([USER, CALLED, *RESULTS, {"role": "user", "content": "So?"}])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"].endswith("none\n\nSo?")


def test_a_template_that_knows_none_gets_the_documented_text_as_system_message() -> None:
    plan = OutputPlan.of(GENERIC, TOOLS)
    assert plan.template_tools is None
    system, user = plan.messages([USER])
    function = '{"name": "weather", "description": "Tell it.", "parameters": {"type": "object"}}'
    assert system == {"role": "system", "content": TOOL_PROMPT.format(functions=function, form=JSON_FORM)}
    assert user == USER


def test_the_text_follows_what_the_system_message_says() -> None:
    messages = OutputPlan.of(GENERIC, TOOLS).messages([{"role": "system", "content": "Be brief."}, USER])
    assert len(messages) == 2
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call these functions:\n")


def test_the_text_stands_in_the_first_message_where_no_system_message_is_taken() -> None:
    (message,) = OutputPlan.of(OutputFormat("json", takes_system=False), TOOLS).messages([USER])
    assert message["role"] == "user"
    assert message["content"].endswith("answer in plain text.\n\nHi")


def test_earlier_calls_and_results_become_messages_every_template_knows() -> None:
    plan = OutputPlan.of(GENERIC)
    assert plan.messages([USER, CALLED, *RESULTS]) == [
        USER,
        {
            "role": "assistant",
            "content": '{"name": "weather", "arguments": {"city": "Oslo"}}\n{"name": "weather", "arguments": {}}',
        },
        {
            "role": "user",
            "content": "The function weather returned:\n7 degrees\n\nThe function weather returned:\nnone",
        },
    ]


def test_nothing_is_added_without_tools() -> None:
    assert OutputPlan.of(GENERIC).messages([USER]) == [USER]


def test_the_documented_text_is_the_one_in_use() -> None:
    shown = TOOL_PROMPT.replace("{form}", JSON_FORM).splitlines()
    document = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    assert all(line in document for line in shown if line != "{functions}")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    plan = OutputPlan.of(OutputFormat("hermes", shows_tools=True), TOOLS, "none")
    assert (plan.template_tools, plan.tools, plan.constraint(Letters(), [65])) == (None, (), None)


def test_tools_are_refused_where_the_models_format_is_not_read() -> None:
    with pytest.raises(InvalidField, match="in a form that Kvarn does not read") as refused:
        OutputPlan.of(OutputFormat(None, shows_tools=True), TOOLS)
    assert refused.value.field == "tools"
    assert OutputPlan.of(OutputFormat(None, shows_tools=True), TOOLS, "none").tools == ()


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("assistant\n<think>\n", True), ("assistant\n", False), ("<think>\n\n</think>\n\n", False), ("<think>", True)],
)
def test_reasoning_the_prompt_opens_is_noticed(prompt: str, is_open: bool) -> None:
    plan = OutputPlan.of(OutputFormat(None, THINK))
    around = plan.answer_context(Letters(), [ord(character) for character in prompt], "seed")
    assert around == AnswerContext("seed", starts_in_reasoning=is_open)
    parsed = parse_output("Hm.</think>Yes.", plan.format, (), around)
    assert parsed.reasoning == ("Hm." if is_open else None)


def test_a_constraint_of_the_caller_is_kept_where_no_reasoning_is_open() -> None:
    wanted = JsonSchema({"type": "integer"})
    plan = OutputPlan.of(OutputFormat(None, THINK))
    assert plan.constraint(Letters(), [65], wanted) is wanted
    assert isinstance(plan.constraint(Letters(), list(b"<think>"), wanted), Grammar)


def test_a_named_choice_is_enforced_and_its_calls_are_told_early() -> None:
    plan = OutputPlan.of(GENERIC, TOOLS, NamedFunction("weather"))
    assert isinstance(plan.constraint(Letters(), [1]), Grammar)
    assert plan.answer_context(Letters(), [1], "x") == AnswerContext("x", is_enforced=True)
    assert OutputPlan.of(GENERIC, TOOLS).answer_context(Letters(), [1], "x") == AnswerContext("x")
