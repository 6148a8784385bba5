"""Grammars that enforce calls: what llguidance lets through, and that it is read back as the calls it is."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvarn.errors import InvalidParameter
from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.json_repair import is_strict_object
from kvarn.server.chat.output.output_stream import AnswerContext
from kvarn.server.chat.output.tool_grammar import (
    MAX_PARALLEL_CALLS,
    OptionalCalls,
    after_reasoning,
    formatted_text,
    tool_constraint,
)
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, ToolSpec
from kvarn.structured.constraints import Grammar, JsonSchema, Regex
from tests.unit.server.output.texts import parse_output

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
WEATHER = ToolSpec("weather", "", CITY, is_strict=True)
ANY = {"type": "object", "additionalProperties": True}
ZERO = ToolSpec("zero", "", {"type": "object", "properties": {}}, is_strict=False)
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"

ONE_CALL = {
    "hermes": (OutputFormat("hermes"), HERMES, "\n"),
    "llama3": (OutputFormat("llama3"), CALL.replace("arguments", "parameters"), "; "),
    "mistral": (OutputFormat("mistral_names"), f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", ""),
    "json": (OutputFormat("json"), CALL, "\n"),
}


@pytest.mark.parametrize("form", ONE_CALL)
def test_required_calls_are_written_in_the_models_own_format_and_read_back(form: str) -> None:
    format, call, between = ONE_CALL[form]
    grammar = _grammar(format, "required")
    assert _accepts(grammar, call)
    assert _accepts(grammar, between.join([call] * MAX_PARALLEL_CALLS))
    assert not _accepts(grammar, between.join([call] * (MAX_PARALLEL_CALLS + 1)))
    assert not _accepts(grammar, "Hello")
    assert not _accepts(grammar, "")
    parsed = parse_output(between.join([call, call]), format, ["weather"], AnswerContext(is_enforced=True))
    assert [one.arguments_json for one in parsed.tool_calls] == [ARGUMENTS, ARGUMENTS]


def test_mistrals_older_form_is_one_list() -> None:
    grammar = _grammar(OutputFormat("mistral"), "required")
    assert _accepts(grammar, f"[TOOL_CALLS][{CALL}, {CALL}]")
    assert not _accepts(grammar, f"[TOOL_CALLS]{CALL}")


@pytest.mark.parametrize("form", ONE_CALL)
def test_a_named_choice_allows_this_function_once(form: str) -> None:
    format, call, between = ONE_CALL[form]
    grammar = _grammar(format, NamedFunction("weather"))
    assert _accepts(grammar, call)
    assert not _accepts(grammar, between.join([call, call]))
    assert not _accepts(_grammar(format, NamedFunction("zero")), call)


@pytest.mark.parametrize("form", ONE_CALL)
def test_arguments_follow_the_schema(form: str) -> None:
    format, call, _ = ONE_CALL[form]
    grammar = _grammar(format, "required")
    for wrong in ("{}", '{"city": 1}', '{"city": "Oslo", "n": "2"}', '{"city": "Oslo", "more": 1}'):
        assert not _accepts(grammar, call.replace(ARGUMENTS, wrong))
    assert _accepts(grammar, call.replace(ARGUMENTS, '{"city": "Oslo", "n": 2}'))


@pytest.mark.parametrize("odd", ['"\\u0000"', "1e999"])
def test_a_grammar_does_not_forbid_what_is_mended(odd: str) -> None:
    call = f'{{"name": "any", "arguments": {{"a": {odd}}}}}'
    grammar = tool_constraint(OutputFormat("json"), [ToolSpec("any", "", ANY, is_strict=False)], "required")
    assert grammar is not None
    assert _accepts(grammar, call)
    (read,) = parse_output(call, OutputFormat("json"), ["any"], AnswerContext(is_enforced=True)).tool_calls
    assert is_strict_object(read.arguments_json)


def test_one_call_at_most_without_parallel_calls() -> None:
    grammar = _grammar(OutputFormat("hermes"), "required", is_parallel=False)
    assert _accepts(grammar, HERMES)
    assert not _accepts(grammar, f"{HERMES}\n{HERMES}")


@pytest.mark.parametrize(("tools", "choice"), [([ZERO, WEATHER], "auto"), ([], "auto"), ([WEATHER], "none")])
def test_without_need_there_is_no_grammar(tools: list[ToolSpec], choice: ToolChoice) -> None:
    assert tool_constraint(OutputFormat("json"), tools, choice) is None


REPORT = JsonSchema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


@pytest.mark.parametrize("form", ONE_CALL)
def test_where_the_text_has_a_format_calls_are_free_to_come_and_read_back(form: str) -> None:
    format, call, between = ONE_CALL[form]
    grammar = OptionalCalls([WEATHER, ZERO]).grammar(format, starts_in_reasoning=False)
    assert _accepts(grammar, call)
    assert _accepts(grammar, between.join([call, call]))
    assert not _accepts(grammar, call.replace(ARGUMENTS, '{"city": 1}'))
    single = OptionalCalls([WEATHER], is_parallel=False).grammar(format, starts_in_reasoning=False)
    assert _accepts(single, call)
    assert not _accepts(single, between.join([call, call]))
    (read,) = parse_output(call, format, ["weather"], AnswerContext()).tool_calls
    assert read.arguments_json == ARGUMENTS


def test_a_text_in_a_format_is_one_line_after_the_reasoning() -> None:
    grammar = formatted_text(OutputFormat("hermes", THINK), REPORT, starts_in_reasoning=True)
    assert _accepts(grammar, 'Hm.</think>\n{"ok": false}')
    assert not _accepts(grammar, '{"ok": false}')
    plain = formatted_text(OutputFormat("json"), REPORT, starts_in_reasoning=False)
    assert _accepts(plain, '{"ok": false}')
    assert not _accepts(plain, '{\n"ok": false}')
    assert parse_output('{"ok": false}', OutputFormat("json"), ["weather"]).content == '{"ok": false}'


def test_only_strict_tools_insist_on_a_schema_that_cannot_be_followed() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    free, strict = (
        OptionalCalls([ToolSpec("odd", "", odd, is_strict=is_strict)], is_loose=True).grammar(
            OutputFormat("json"), starts_in_reasoning=False
        )
        for is_strict in (False, True)
    )
    assert _accepts(free, '{"name": "odd", "arguments": {"a": "anything"}}')
    assert LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(strict.text)).get_error()


def test_reasoning_the_prompt_has_opened_is_closed_before_the_call() -> None:
    grammar = _grammar(OutputFormat("hermes", THINK), "required", starts_in_reasoning=True)
    assert _accepts(grammar, f"Hm, {{.\n</think>\n\n{HERMES}")
    assert not _accepts(grammar, HERMES)
    assert not _accepts(grammar, "</think>Hello")


def test_markers_that_are_control_tokens_are_named_by_their_id() -> None:
    format = OutputFormat("mistral_names", marker_ids=(("[TOOL_CALLS]", 9), ("[ARGS]", 32)))
    grammar = _grammar(format, "required")
    assert "<[9]>" in grammar.text
    assert "<[32]>" in grammar.text
    assert "TOOL_CALLS" not in grammar.text


def test_a_schema_of_the_caller_waits_until_the_reasoning_is_closed() -> None:
    grammar = after_reasoning(OutputFormat(None, THINK), JsonSchema(CITY))
    assert _accepts(grammar, f"Hm.\n</think>\n{ARGUMENTS}")
    assert not _accepts(grammar, ARGUMENTS)
    assert not _accepts(grammar, "</think>Hello")


def test_a_pattern_of_the_caller_cannot_wait_and_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="opens its reasoning"):
        after_reasoning(OutputFormat(None, THINK), Regex("a+"))


def _grammar(format: OutputFormat, choice: ToolChoice, **options: bool) -> Grammar:
    grammar = tool_constraint(format, [WEATHER, ZERO], choice, **options)
    assert grammar is not None
    return grammar


def _accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()
