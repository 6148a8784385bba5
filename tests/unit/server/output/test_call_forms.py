"""Every form of calls: what is written in it is read back, and the grammars let it through and nothing else."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvarn.sampling.token_masks import is_allowed
from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.call_forms.table import FORMS, ToolFormat
from kvarn.server.chat.output.call_forms.writer import Call, written
from kvarn.server.chat.output.deltas import ParsedOutput
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.json_repair import is_strict_object
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.output.output_stream import AnswerContext
from kvarn.server.chat.output.tool_grammar import MAX_PARALLEL_CALLS, tool_constraint
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, check_tools
from kvarn.structured.lazy_matcher import LazyConstraint
from tests.conftest import Size
from tests.unit.server.output.test_lazy_grammar import PieceWords, compiler
from tests.unit.server.output.texts import cut, parse_output, read_pieces

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object", "additionalProperties": True},
    },
    "required": ["city"],
}
FREE = {"type": "object", "additionalProperties": True}
SCHEMAS: dict[str, Any] = {"weather": PARAMETERS, "get-time": {"type": "object", "properties": {}}, "any": FREE}
GIVEN = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in SCHEMAS.items()
]
MARKED: list[ToolFormat] = [name for name in FORMS if name != "harmony"]
OWN: list[ToolFormat] = [name for name in MARKED if not FORMS[name].is_bare]
CALL: Call = ("weather", {"city": "Oslo", "days": 3, "unit": "C", "exact": True, "tags": ["a", "b"], "more": {"a": 1}})


def random_call(rng: random.Random) -> Call:
    if rng.random() < 0.3:
        return "get-time", {}
    texts = ["Oslo", "é 日本", 'say "hi"', "two lines", "007", "true", "", "x<y", "{}"]
    values = {
        "city": rng.choice(texts),
        "days": rng.choice([0, -3, 1234]),
        "unit": rng.choice(["C", "F"]),
        "exact": rng.choice([True, False]),
        "tags": rng.sample(texts, rng.randint(0, 3)),
        "more": {"a": [1, {"b": "c"}], "d": None},
    }
    return "weather", {key: value for key, value in values.items() if key == "city" or rng.random() < 0.5}


def read_back(parsed: ParsedOutput) -> list[Call]:
    return [(call.name, json.loads(call.arguments_json)) for call in parsed.tool_calls]


@pytest.mark.parametrize("name", MARKED)
def test_what_is_written_is_read_back_and_let_through(name: ToolFormat) -> None:
    rng, format = random.Random(name), OutputFormat(name)
    for _ in range(12):
        calls = [random_call(rng) for _ in range(rng.randint(1, 3))]
        text = written(FORMS[name], calls)
        for context in (AnswerContext("s"), AnswerContext("s", is_enforced=True)):
            whole = parse_output(text, format, SCHEMAS, context)
            assert read_back(whole) == calls, text
            assert (whole.content, whole.is_cut) == (None, False)
            for pieces in (list(text), cut(rng, text)):
                assert read_pieces(pieces, format, context, SCHEMAS) == whole
        assert accepts(name, "required", text), text


@pytest.mark.parametrize("name", MARKED)
def test_a_grammar_wants_calls_in_this_form_and_few_enough(name: ToolFormat) -> None:
    form, many = FORMS[name], [("get-time", {})] * MAX_PARALLEL_CALLS
    assert accepts(name, "required", written(form, many))
    assert not accepts(name, "required", written(form, [*many, many[0]]))
    assert not accepts(name, "required", "Hello")
    assert accepts(name, NamedFunction("weather"), written(form, [CALL]))
    assert not accepts(name, NamedFunction("weather"), written(form, many[:1]))
    assert not accepts(name, NamedFunction("weather"), written(form, [CALL, CALL]))


WRONG: list[dict[str, Any]] = [
    {},
    {"days": 3},
    {"city": "a", "days": "x"},
    {"city": "a", "unit": "K"},
    {"city": "a", "z": 1},
]


@pytest.mark.parametrize("name", MARKED)
def test_a_grammar_follows_the_schema(name: ToolFormat) -> None:
    wrong = [one for one in WRONG if name != "gemma" or one.get("unit") is None]  # its grammar knows no choice of texts
    assert not any(accepts(name, "required", written(FORMS[name], [("weather", one)])) for one in wrong)


@pytest.mark.parametrize("name", MARKED)
def test_arguments_that_no_schema_names_are_free(name: ToolFormat) -> None:
    text = written(FORMS[name], [("any", {"x": "y", "zz": "two"})])
    assert accepts(name, "required", text), text
    assert read_back(parse_output(text, OutputFormat(name), SCHEMAS)) == [("any", {"x": "y", "zz": "two"})]


@pytest.mark.parametrize("name", OWN)
def test_a_call_that_has_begun_follows_its_schema_and_then_the_model_is_free(name: ToolFormat) -> None:
    form = FORMS[name]
    assert refused_at(name, f"Well. {written(form, [CALL, ('get-time', {})])}\nThat was it.") is None
    good, bad = (written(form, [("weather", {"city": "a", "days": days})]) for days in (3, "x"))
    place = refused_at(name, bad)
    assert place is not None
    assert bad[:place] == good[:place]


def test_control_tokens_in_markers_are_named_by_their_ids() -> None:
    ids = (("<|tool_call_begin|>", 7), ("<|tool_call_end|>", 8), ("<|tool_calls_section_begin|>", 9))
    grammar = tool_constraint(OutputFormat("kimi", marker_ids=ids), check_tools(GIVEN), "required")
    assert grammar is not None
    assert all(f"<[{token_id}]>" in grammar.text for _, token_id in ids)
    assert '"functions."' in grammar.text
    assert "tool_call_begin" not in grammar.text
    shown = OutputFormat("kimi", marker_ids=ids)
    assert shown.visible_ids(has_tools=True) == {7, 8, 9}
    assert shown.visible_ids(has_tools=False) == frozenset()


def test_types_come_back_from_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": ["string", "null"]},
            "c": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "d": {"$ref": "#/$defs/digits"},
            "e": {},
            "f": {"type": "object"},
            "g": {"type": "number"},
        },
        "$defs": {"digits": {"type": "string"}},
    }
    values = {"a": "null", "b": "null", "c": "5", "d": "12", "e": "12", "f": "{'k': [1, None, True]}", "g": "ten"}
    text = "<tool_call>f" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items()
    )
    (call,) = parse_output(text + "</tool_call>", OutputFormat("arg_key"), {"f": schema}).tool_calls
    restored = {"a": "null", "b": None, "c": 5, "d": "12", "e": 12, "f": {"k": [1, None, True]}, "g": "ten"}
    assert json.loads(call.arguments_json) == restored


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen_xml", "<tool_call>\n<function=stranger>\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>"),
        (
            "qwen_xml",
            "<tool_call>\n<function=weather>\n<parameter=a>1</parameter><parameter=a>2</parameter></function>",
        ),
        ("python_list", "<|tool_call_start|>[weather(city=Oslo)]<|tool_call_end|>"),
        ("python_list", "<|tool_call_start|>[weather('Oslo')]<|tool_call_end|>"),
        ("python_list", "<|tool_call_start|>[weather(days=1e999)]<|tool_call_end|>"),
        ("python_list", "<|tool_call_start|>[weather(city='\\ud83d\\x00')]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:weather{city:Oslo}<tool_call|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{bad}<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>weather:0<|tool_call_argument_begin|>{}"),
        ("python_bare", "[1] says so, and [weather] too"),
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(name: ToolFormat, text: str) -> None:
    parsed = parse_output(text, OutputFormat(name), SCHEMAS)
    assert (parsed.content, parsed.tool_calls) == (text, ())


@pytest.mark.parametrize("name", MARKED)
def test_any_split_of_damaged_calls_adds_up_to_the_whole(name: ToolFormat, size: Size) -> None:
    rng, format = random.Random(name), OutputFormat(name, THINK)
    for _ in range(size(25, 250)):
        text = damaged(
            rng, "Hm. " * rng.randint(0, 1) + written(FORMS[name], [random_call(rng) for _ in range(2)]) + " So."
        )
        for context in (AnswerContext("s"), AnswerContext("s", is_enforced=True)):
            whole = parse_output(text, format, SCHEMAS, context)
            assert read_pieces(list(text), format, context, SCHEMAS) == whole, text
            assert read_pieces(cut(rng, text), format, context, SCHEMAS) == whole, text
        free = parse_output(text, format, SCHEMAS)
        assert all(is_strict_object(call.arguments_json) for call in free.tool_calls)
        assert free.tool_calls or (free.content or "") == text


@pytest.mark.parametrize("name", OWN)
def test_hostile_text_takes_time_in_proportion_to_its_length(name: ToolFormat, patience: float, size: Size) -> None:
    form, num_characters = FORMS[name], size(20_000, 200_000)
    whole = written(form, [("weather", {"city": "a"})])
    for text in (form.marker, whole[:-3], whole[: len(whole) // 2], form.marker + " \n"):
        hostile = text * (num_characters // len(text))
        started_at = time.process_time()
        parse_output(hostile, OutputFormat(name), SCHEMAS)
        assert time.process_time() - started_at < 4e-5 * num_characters * patience, text


@pytest.mark.parametrize("end", ["", "?"])  # the last call is never closed, or fails at its last character
def test_calls_within_calls_that_fail_take_time_in_proportion_to_their_length(
    end: str, patience: float, size: Size
) -> None:
    form, number = OutputFormat("minimax_xml"), size(400, 4000)
    begin = '<minimax:tool_call><invoke name="weather">'
    text = begin + "".join(f'<parameter name="a{i}">{begin}<parameter name="b"></parameter>' for i in range(number))
    started_at = time.process_time()
    parsed = parse_output(text + end, form, SCHEMAS)
    assert time.process_time() - started_at < 1e-5 * len(text) * patience
    assert (parsed.content, parsed.tool_calls) == (text + end, ())


def damaged(rng: random.Random, text: str) -> str:
    """A few characters lost, doubled or replaced, or the end cut off."""
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(text))
        piece = rng.choice(
            ["", text[at] * 2, rng.choice(["<", "{", '"', "'", ")", "]", "\n", "\0", "\ud7ff", "weather", ">"])]
        )
        text = text[:at] + piece + text[at + 1 :]
    return text[: rng.choice([len(text), len(text), rng.randint(0, len(text))])]


def accepts(name: ToolFormat, choice: ToolChoice, text: str) -> bool:
    matcher = start_of(name, choice).deep_copy()
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()


@cache
def start_of(name: ToolFormat, choice: ToolChoice) -> LLMatcher:
    grammar = tool_constraint(OutputFormat(name), check_tools(GIVEN), choice)
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.get_error(), (matcher.get_error(), grammar.text)
    return matcher


@cache
def lazily(name: ToolFormat) -> LazyConstraint:
    plan = OutputPlan.of(OutputFormat(name), GIVEN)
    made = plan.lazy_constraint(PieceWords(), [1], compiler().compile)  # type: ignore[arg-type]
    assert made is not None
    return made


def refused_at(name: ToolFormat, text: str) -> int | None:
    """The first character that may not be written, None: all of them may."""
    matcher, ids = lazily(name).matcher(), [*text.encode()]
    for index, token_id in enumerate(ids):
        mask = matcher.mask_after(ids[:index], 0)
        if mask is not None and not is_allowed(mask, token_id):
            return len(bytes(ids[:index]).decode(errors="ignore"))
    return None
