"""Answers of gpt-oss: channels to reasoning, content and calls, however they are cut; and their grammars."""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvarn.server.chat.output.call_forms.detect import HARMONY
from kvarn.server.chat.output.deltas import ContentDelta, Delta, ParsedOutput, ToolCallArguments, joined
from kvarn.server.chat.output.formats import HARMONY_MARKERS, OutputFormat
from kvarn.server.chat.output.harmony_stream import MAX_HEADER_CHARACTERS, HarmonyStream
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.output.output_stream import AnswerContext
from kvarn.server.chat.output.tool_grammar import formatted_text, tool_constraint
from kvarn.server.chat.output.tools import ToolSpec
from kvarn.structured.constraints import Grammar, JsonSchema
from tests.conftest import Size
from tests.unit.server.output.test_lazy_grammar import PieceWords, compiler, tool
from tests.unit.server.output.texts import cut

FORMAT = OutputFormat("harmony", HARMONY, shows_tools=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THOUGHT = "<|channel|>analysis<|message|>Hm, {so}.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
FINAL = "<|channel|>final<|message|>It rains.\n<|return|>"
FRAGMENTS = (
    *HARMONY_MARKERS,
    *("assistant", "analysis", "final", "commentary", " to=functions.weather", "to=functions.f", " json", "<|", "|>"),
    *('{"city": "Oslo"}', '{"city": ', "Hello", " ", "\n", "é", "<|chan", "to", '"', "{}", "{", "}", " to=browser"),
)


def read(pieces: list[str], context: AnswerContext | None = None) -> tuple[ParsedOutput, list[Delta]]:
    stream = HarmonyStream(FORMAT, {"weather": CITY}, context)
    deltas = [*(delta for piece in pieces for delta in stream.push(piece)), *stream.end()]
    return joined(deltas, is_cut=stream.is_cut), deltas


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "arguments"),
    [
        (THOUGHT + NEXT + FINAL, "Hm, {so}.", "It rains.", []),
        (THOUGHT + NEXT + CALL, "Hm, {so}.", None, ['{"city": "Oslo"}']),
        (CALL, None, None, ['{"city": "Oslo"}']),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city": "a"}', None, None, ['{"city": "a"}']),
        (
            "<|channel|>commentary<|message|>I will look.<|end|>" + NEXT + CALL,
            None,
            "I will look.",
            ['{"city": "Oslo"}'],
        ),
        (CALL + NEXT + CALL, None, None, ['{"city": "Oslo"}'] * 2),
        (FINAL, None, "It rains.", []),
        ("Just text.", None, "Just text.", []),
        ("<|channel|>final", None, None, []),
        ("<|channel|>analysis<|message|>Hm", "Hm", None, []),
        ("<|channel|>commentary to=functions.other<|message|>{}", None, "{}", []),
        ("<|channel|>commentary to=functions.weather<|message|>{bad}<|call|>", None, "{bad}", []),
        ("<|channel|>commentary to=functions.weather<|message|>{", None, "{", []),
    ],
)
def test_channels_become_parts(text: str, reasoning: str | None, content: str | None, arguments: list[str]) -> None:
    parsed, _ = read([text])
    found = [call.arguments_json for call in parsed.tool_calls]
    assert (parsed.reasoning, parsed.content, found) == (reasoning, content, arguments)
    assert read(list(text))[0] == parsed


def test_an_enforced_call_comes_as_it_is_written_and_may_be_cut_off() -> None:
    context = AnswerContext("s", is_enforced=True)
    parsed, deltas = read(list(CALL), context)
    assert sum(isinstance(delta, ToolCallArguments) for delta in deltas) > 3
    assert parsed.has_whole_calls
    parsed, _ = read([CALL[: CALL.index("Oslo") + 2]], context)
    assert (parsed.is_cut, parsed.tool_calls[0].arguments_json) == (True, '{"city": "Os')


@pytest.mark.parametrize("is_enforced", [False, True])
def test_any_split_adds_up_to_the_whole_and_content_tells_its_place(is_enforced: bool, size: Size) -> None:
    rng, context = random.Random(is_enforced), AnswerContext("s", is_enforced=is_enforced)
    for _ in range(size(300, 3000)):
        text = "".join(rng.choice([*FRAGMENTS, THOUGHT + NEXT, CALL + NEXT]) for _ in range(rng.randint(0, 14)))
        whole, _ = read([text], context)
        assert read(list(text), context)[0] == whole, text
        parsed, deltas = read(cut(rng, text), context)
        assert parsed == whole, text
        content = [delta for delta in deltas if isinstance(delta, ContentDelta)]
        assert all(text[delta.at :].startswith(delta.text) for delta in content), text


def test_a_header_without_end_is_content() -> None:
    text = "<|channel|>" + "x" * (MAX_HEADER_CHARACTERS + 10)
    assert read([text])[0].content == text
    assert read(list(text))[0].content == text


def test_forced_calls_and_texts_may_think_first() -> None:
    weather = ToolSpec("weather", "", CITY, is_strict=False)
    calls = tool_constraint(FORMAT, [weather], "required", starts_in_reasoning=True)
    assert calls is not None
    assert accepts(calls, CALL.removesuffix("<|call|>"))
    assert accepts(calls, THOUGHT + NEXT + CALL.removesuffix("<|call|>"))
    assert not accepts(calls, CALL.replace('{"city": "Oslo"}<|call|>', "{}"))
    assert not accepts(calls, FINAL)
    text = formatted_text(FORMAT, JsonSchema(CITY), starts_in_reasoning=True)
    assert accepts(text, '<|channel|>final<|message|>{"city": "Oslo"}')
    assert accepts(text, THOUGHT + NEXT + '<|channel|>final<|message|>{"city": "Oslo"}')
    assert not accepts(text, '{"city": "Oslo"}')


def test_a_call_that_has_begun_follows_its_schema() -> None:
    plan = OutputPlan.of(FORMAT, [tool(parameters=CITY)])
    lazy = plan.lazy_constraint(PieceWords(), [1], compiler().compile)  # type: ignore[arg-type]
    assert lazy is not None
    head = '<|channel|>commentary to=functions.weather<|message|>{"'
    mask = lazy.matcher().mask_after(list(head.encode()), 0)
    assert mask is not None
    allowed = [chr(one) for one in range(128) if mask[one // 32] >> (one % 32) & 1]
    assert allowed == ["c"]


def test_its_markers_stay_visible_without_tools() -> None:
    ids = tuple((marker, 100 + index) for index, marker in enumerate(HARMONY_MARKERS))
    shown = OutputFormat("harmony", HARMONY, marker_ids=ids)
    assert shown.visible_ids(has_tools=False) == {token_id for _, token_id in ids}


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()
