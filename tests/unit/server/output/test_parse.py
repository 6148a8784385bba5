"""Reasoning, content and calls of whole answers, one form at a time."""

from __future__ import annotations

import json

import pytest

from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.deltas import ContentDelta, ToolCallArguments, ToolCallStart
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.json_repair import is_strict_object
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream
from tests.unit.server.output.texts import FORMATS, ODD_ARGUMENTS, TOOLS, parse_output, read_pieces

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "f", "parameters": {}}'

GOOD = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ["weather"]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", ["weather", "f"]),
    ("hermes", f"<tool_call>[{CALL}, {OTHER}]</tool_call>", ["weather", "f"]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', ["f"]),
    ("hermes", f"<tool_call>nothing<tool_call>{CALL}</tool_call>", ["weather"]),
    ("hermes", f"<tool_call>{CALL}", ["weather"]),  # nothing but the end is missing
    ("hermes", f"<tool_call>{CALL}</tool_cal", ["weather"]),
    ("hermes", CALL, ["weather"]),
    ("llama3", f"<|python_tag|>{CALL}", ["weather"]),
    ("llama3", OTHER, ["f"]),
    ("llama3", f"{OTHER}; {CALL};{OTHER}", ["f", "weather", "f"]),
    ("llama3", f"Let me see.<|python_tag|>{OTHER}", ["f"]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', ["f"]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", ["weather", "f"]),
    ("mistral", f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdefghi"}}]', ["weather"]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', ["weather"]),
    ("mistral", '[TOOL_CALLS]get-time[ARGS]{}[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', ["get-time", "f"]),
    ("json", f"\n{CALL}\n{OTHER}", ["weather", "f"]),
    ("json", f"[{CALL},{OTHER}]", ["weather", "f"]),
    ("json+think", f"<think>Which?</think>\n\n{CALL}", ["weather"]),
]

BAD = [
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>"),  # bad JSON
    ("hermes", f"<tool_call>{CALL.replace('weather', 'stranger')}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    *(("hermes", f'<tool_call>{{"name": "f", "arguments": {odd}}}</tool_call>') for odd in ODD_ARGUMENTS),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "note": "x"}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 80 + "1" + "}" * 80 + "}</tool_call>"),
    ("hermes", f"Sure: {CALL}"),  # neither a marker nor a line of its own
    ("llama3", f"Here is a call: {CALL}"),
    ("llama3", '<|python_tag|>weather.call(city="Oslo")'),
    ("mistral", f"[TOOL_CALLS][{CALL}"),  # not closed: none of it is a call
    ("mistral", "[TOOL_CALLS]stranger[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f{}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a"}'),
    ("json", '{"answer": 42}'),
    ("json", '{"name": "Ada", "arguments": {}}'),
    ("json", f"Sure: {CALL}"),
    ("json", f"; {CALL}"),
    ("json", '  [1, 2, 3]\n{"name": "f"'),
]


@pytest.mark.parametrize(("form", "text", "names"), GOOD)
def test_calls_are_found(form: str, text: str, names: list[str]) -> None:
    parsed = parse_output(text, FORMATS[form], TOOLS)
    assert [call.name for call in parsed.tool_calls] == names
    assert all(isinstance(json.loads(call.arguments_json), dict) for call in parsed.tool_calls)


@pytest.mark.parametrize(("form", "text"), BAD)
def test_what_only_looks_like_a_call_is_content_to_the_letter(form: str, text: str) -> None:
    parsed = parse_output(text, FORMATS[form], TOOLS)
    assert parsed.tool_calls == ()
    assert parsed.content == text
    assert read_pieces(list(text), FORMATS[form]) == parsed


def test_arguments_come_out_as_they_were_written() -> None:
    arguments = '{ "city" : "Åre \\u00e9 </tool_call>", "n":1e300 }'
    parsed = parse_output(f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>', FORMATS["hermes"], TOOLS)
    assert parsed.tool_calls[0].arguments_json == arguments


def test_white_space_around_calls_is_not_content() -> None:
    text = f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\n"
    parsed = parse_output(text, FORMATS["hermes"], TOOLS)
    assert (parsed.content, len(parsed.tool_calls)) == ("Let me see.", 2)


def test_content_after_a_call_keeps_its_distance_to_the_content_before() -> None:
    text = f"One.<tool_call>{CALL}</tool_call>\nTwo. "
    assert parse_output(text, FORMATS["hermes"], TOOLS).content == "One.\nTwo. "


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert parse_output(text, FORMATS["hermes"]).content == text


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n<think>Hm.", "Hm.", None),
        ("<think>\n\n</think>\n\nYes.", None, "Yes."),
        ("Yes. <think>Hm.</think>", None, "Yes. <think>Hm.</think>"),
        ("</think>Yes.", None, "</think>Yes."),
        ("<thin", None, "<thin"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("  Yes.\n", None, "  Yes.\n"),
        ("<think>\n ", None, None),
    ],
)
def test_reasoning_is_split_off(text: str, reasoning: str | None, content: str | None) -> None:
    parsed = parse_output(text, FORMATS["hermes+think"], TOOLS)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm", "Hm", None),
        ("<think>Hm</think>Yes", "Hm", "Yes"),
        (" \n", None, None),
    ],
)
def test_reasoning_may_begin_in_the_prompt(text: str, reasoning: str | None, content: str | None) -> None:
    parsed = parse_output(text, OutputFormat(None, THINK), (), AnswerContext(starts_in_reasoning=True))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_calls_inside_reasoning_are_thoughts() -> None:
    text = f"<think><tool_call>{CALL}</tool_call></think>No."
    parsed = parse_output(text, FORMATS["hermes+think"], TOOLS)
    assert (parsed.tool_calls, parsed.content) == ((), "No.")


def test_content_is_released_as_soon_as_it_cannot_be_a_call() -> None:
    stream = OutputStream(FORMATS["json"], TOOLS)
    assert stream.push('{"answer') == []
    assert stream.push('": ') == [ContentDelta('{"answer":')]
    named = OutputStream(FORMATS["hermes"], TOOLS)
    assert named.push('<tool_call>{"name": "wea') == []
    assert named.push('k", ') == [ContentDelta('<tool_call>{"name": "weak",')]


def test_a_free_call_comes_out_when_it_is_whole() -> None:
    stream = OutputStream(FORMATS["hermes"], TOOLS, AnswerContext("s"))
    assert stream.push(f"<tool_call>{CALL}</tool_call") == []
    start, arguments = stream.push(">")
    assert isinstance(start, ToolCallStart)
    assert arguments == ToolCallArguments(0, '{"city": "Oslo"}')


def test_enforced_arguments_come_out_while_they_are_written() -> None:
    stream = OutputStream(FORMATS["hermes"], TOOLS, AnswerContext("s", is_enforced=True))
    assert stream.push('<tool_call>\n{"name": "weather", "arguments": ') == []
    start, first = stream.push('{"ci')
    assert isinstance(start, ToolCallStart)
    assert start.name == "weather"
    assert first == ToolCallArguments(0, '{"ci')
    assert stream.push('ty": "Os') == [ToolCallArguments(0, 'ty": "Os')]
    assert stream.push('lo"}}\n</tool_') == [ToolCallArguments(0, 'lo"}')]
    assert stream.push("call>") == []
    assert stream.end() == []


@pytest.mark.parametrize("form", ["hermes", "mistral", "json", "llama3"])
def test_an_enforced_call_that_was_cut_off_keeps_its_name_and_the_arguments_so_far(form: str) -> None:
    marker = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS][", "json": "", "llama3": ""}[form]
    parsed = parse_output(marker + CALL[:-8], FORMATS[form], TOOLS, AnswerContext(is_enforced=True))
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("weather", '{"city": ')]
    assert parsed.content is None
    assert parsed.is_cut
    assert not parsed.has_whole_calls


def test_an_enforced_call_whose_arguments_are_whole_is_not_cut_off() -> None:
    enforced = AnswerContext(is_enforced=True)
    assert parse_output(f"<tool_call>\n{CALL}\n", FORMATS["hermes"], TOOLS, enforced).has_whole_calls
    second = parse_output(f"[TOOL_CALLS][{CALL}, {CALL[:12]}", FORMATS["mistral"], TOOLS, enforced)
    assert (len(second.tool_calls), second.has_whole_calls) == (1, False)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"a": "\\ud83d"}', '{"a": "\\ufffd"}'),
        ('{"a": "\\ud83d\\ude00\\ude00"}', '{"a": "\\ud83d\\ude00\\ufffd"}'),
        ('{"\\u0000": "\\\\u0000"}', '{"\\ufffd": "\\\\u0000"}'),
        ('{"a": [1e999, -1e999, 1e3]}', '{"a": [1.7976931348623157e+308, -1.7976931348623157e+308, 1e3]}'),
        ('{"a": 0.' + "5" * 5000 + "}", '{"a": 0.5555555555555556}'),
        ('{"a": "1e999 \\" 1e999", "b": true}', '{"a": "1e999 \\" 1e999", "b": true}'),
    ],
    ids=["half a pair", "half after a pair", "NUL", "too large", "too long", "text"],
)
def test_what_no_reader_takes_is_mended_in_an_enforced_call(written: str, told: str) -> None:
    enforced = AnswerContext(is_enforced=True)
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    parsed = parse_output(text, FORMATS["hermes"], TOOLS, enforced)
    assert [call.arguments_json for call in parsed.tool_calls] == [told]
    assert is_strict_object(told)
    assert read_pieces(list(text), FORMATS["hermes"], enforced) == parsed


def test_a_call_of_mistral_has_an_id_its_templates_accept() -> None:
    parsed = parse_output("[TOOL_CALLS]f[ARGS]{}", FORMATS["mistral"], TOOLS, AnswerContext("request:0"))
    assert parsed.tool_calls[0].id.isalnum()
    assert len(parsed.tool_calls[0].id) == 9
