"""Calls that a free model writes as JSON, bare or in a code fence, whatever its own format is."""

from __future__ import annotations

import pytest

from kvarn.server.chat.output.deltas import ContentDelta, ParsedOutput, joined
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream
from tests.unit.server.output.texts import FORMATS

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
SCHEMAS = {"weather": CITY, "now": {"type": "object", "properties": {}}}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
NOW = '{"name": "now", "arguments": {}}'
SPREAD = '{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}'
UNFIT = '{"name": "weather", "arguments": {"days": 2}}'

# text, the names of the calls, the content around them
FOUND = [
    (CALL, ["weather"], None),
    (f"```json\n{CALL}\n```", ["weather"], None),
    (f"```json\n{SPREAD}\n```\n", ["weather"], None),
    (f"```\n{CALL}", ["weather"], None),
    (f"```{CALL}```", ["weather"], None),
    (f"```tool_call\n{CALL}\n{NOW}\n```", ["weather", "now"], None),
    (f"```json\n[{CALL}, {NOW}]\n```", ["weather", "now"], None),
    (f"Let me look.\n\n```json\n{CALL}\n```\n\nDone.", ["weather"], "Let me look.\n\nDone."),
    (f"Let me look.\n{CALL}\nDone.", ["weather"], "Let me look.\nDone."),
    (f"One:\n```json\n{CALL}\n```\nTwo:\n```json\n{NOW}\n```", ["weather", "now"], "One:\nTwo:"),
    (f"<tools>\n  {CALL}\n</tools>", ["weather"], "<tools>\n</tools>"),
    (f"{CALL}\n{NOW}", ["weather", "now"], None),
    (f'{{"calls": [\n{CALL}\n]}}', ["weather"], '{"calls": [\n]}'),
    (f"So:\n[\n{CALL},\n{UNFIT}\n]", ["weather"], f"So:\n[,\n{UNFIT}\n]"),
    (f"```json\n{UNFIT}\n```\n{NOW}", ["now"], f"```json\n{UNFIT}\n```"),
    (f"`x`\n``\n{CALL}", ["weather"], "`x`\n``"),
]
NOT_FOUND = [
    f"Call {CALL} now.",
    f"`{CALL}`",
    UNFIT,
    f"```json\n{UNFIT}\n```",
    f"```json\n{CALL.replace('weather', 'stranger')}\n```",
    f"```json\n{CALL.replace('Oslo', 'a' + chr(0))}\n```",
    f"```json\n{CALL[:-2]}\n```",
    '```json\n{"city": "Oslo"}\n```',
    "```python\nprint({})\n```",
    '{"name": "weather", "arguments": {"city": "Oslo", "days": 0}}',
    '{"name": "weather", "arguments": {"city": "Oslo"}, "why": "x"}',
    "```",
    "``",
    "```json\n",
    "```json\n[",
]


def read(pieces: list[str], form: str = "hermes", schemas: dict[str, object] = SCHEMAS) -> ParsedOutput:
    stream = OutputStream(FORMATS[form], schemas, AnswerContext("s"))
    deltas = [delta for piece in pieces for delta in stream.push(piece)]
    return joined([*deltas, *stream.end()])


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3", "json"])
@pytest.mark.parametrize(("text", "names", "content"), FOUND)
def test_json_that_names_a_tool_and_fits_it_is_a_call(form: str, text: str, names: list[str], content: str) -> None:
    parsed = read([text], form)
    assert [call.name for call in parsed.tool_calls] == names
    assert parsed.content == content


@pytest.mark.parametrize("text", NOT_FOUND)
def test_json_that_names_no_tool_or_does_not_fit_it_is_content_to_the_letter(text: str) -> None:
    parsed = read([text])
    assert (parsed.tool_calls, parsed.content) == ((), text)


@pytest.mark.parametrize("text", [text for text, _, _ in FOUND] + NOT_FOUND)
def test_every_split_into_two_and_into_single_characters_gives_the_same(text: str) -> None:
    whole = read([text])
    assert read(list(text)) == whole
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]]) == whole


def test_a_marked_call_that_is_not_closed_at_the_end_is_a_call() -> None:
    for end in ("", "\n", "\n</tool_ca"):
        parsed = read([f"<tool_call>\n{CALL}{end}"])
        assert ([call.name for call in parsed.tool_calls], parsed.content) == (["weather"], None)


def test_a_marker_in_prose_does_not_hide_the_call_behind_it() -> None:
    parsed = read([f"<tool_call>\n{CALL}\n<tool_call>\n{NOW}\n</tool_call>"])
    assert [call.name for call in parsed.tool_calls] == ["weather", "now"]
    assert parsed.content == "<tool_call>"


def test_the_models_own_format_is_a_call_whether_or_not_the_arguments_fit() -> None:
    """The marker leaves no doubt: who called is told what is wrong, and the text is not shown to a person."""
    assert [call.name for call in read([f"<tool_call>{UNFIT}</tool_call>"]).tool_calls] == ["weather"]
    assert [call.name for call in read([UNFIT], "json").tool_calls] == ["weather"]
    assert read([f"Well.\n{UNFIT}"], "json").tool_calls == ()


def test_code_comes_out_without_waiting_for_its_end() -> None:
    stream = OutputStream(FORMATS["hermes"], SCHEMAS)
    assert stream.push("```c\nint main()\n{\n  r") == [ContentDelta("```c\nint main()\n{\n  r")]
    assert stream.push("eturn 0;\n}\n```") == [ContentDelta("eturn 0;\n}")]
    assert stream.end() == [ContentDelta("\n```")]
