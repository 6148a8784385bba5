"""Calls that a free model begins follow their schemas; everything else it writes is its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from kvarn.engine.engine import Engine
from kvarn.errors import ConstraintError
from kvarn.request import Request
from kvarn.sampling.token_masks import is_allowed
from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.lazy_grammar import lazy_grammar
from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.structured.compiler import ConstraintCompiler
from kvarn.structured.lazy_matcher import LazyConstraint
from kvarn.types import SamplingParams
from tests import submitting
from tests.unit.engine.fake import EOS, VOCAB, completion_of, make_engine, run_to_end

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
UNFIT = '{"name": "weather", "arguments": {"days'  # city comes first
FORMS = {
    "hermes": OutputFormat("hermes"),
    "hermes+think": OutputFormat("hermes", THINK),
    "llama3": OutputFormat("llama3"),
    "mistral": OutputFormat("mistral"),
    "named": OutputFormat("mistral_names"),
    "json": OutputFormat("json"),
}


class PieceWords:
    """Token i is the byte i, and a few are several; 0 ends an answer."""

    PIECES = (b'"weather"', b'", "', b'"weather", "', b'": {}', b'": {"', b'"}}', b"}\n")
    eos_ids = (EOS,)
    bos_id = None
    vocab_size = 256 + len(PIECES)
    unused_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.PIECES[token_id - 256]

    def is_control(self, token_id: int) -> bool:
        return token_id == EOS


@cache
def compiler(vocab_size: int = PieceWords.vocab_size) -> ConstraintCompiler:
    return ConstraintCompiler(PieceWords(), vocab_size)


def tool(name: str = "weather", parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or CITY, **more}}


NOW = tool("now", {"type": "object", "properties": {}})


def lazily(
    form: str = "hermes", tools: Any = (tool(), NOW), *, is_parallel: bool = True, prompt: str = "p"
) -> LazyConstraint:
    plan = OutputPlan.of(FORMS[form], tools, "auto", is_parallel)
    made = plan.lazy_constraint(PieceWords(), list(prompt.encode()), compiler().compile)  # type: ignore[arg-type]
    assert made is not None
    return made


def refused_at(lazy: LazyConstraint, text: str | list[int]) -> int | None:
    """The first token that may not be written, None: all of them may."""
    matcher, ids = lazy.matcher(), [*text.encode()] if isinstance(text, str) else text
    for index, token_id in enumerate(ids):
        mask = matcher.mask_after(ids[:index], 0)
        if mask is not None and not is_allowed(mask, token_id):
            return index
    return None


@pytest.mark.parametrize(
    "text",
    [
        "Hello, I need no tool.",
        'Some JSON:\n{"name": "Ada", "arguments": {"days": 100}}',
        '{"days": 100}',
        f"In prose {UNFIT} is fine",
        "Write <tool_call> and then a line.",
        f"{CALL}\nThat was a call.",
        '{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo",\n    "days": 2\n  }\n}\n',
        f"```json\n{CALL}\n```\nDone.",
        f"<tool_call>\n{CALL}\n</tool_call>\nDone.",
        f'<tool_call>[{CALL}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        '{"arguments": {"days": 100}, "name": "weather"}',
        '{"name": "now", "parameters": {}}',
    ],
)
def test_a_model_may_say_what_it_likes_and_call_as_it_should(text: str) -> None:
    assert refused_at(lazily(), text) is None


@pytest.mark.parametrize("before", ["", "So:\n", "```json\n", f"{CALL}\n", "```\n[", f"[{CALL}, "])
def test_the_arguments_of_a_call_that_has_begun_follow_the_schema(before: str) -> None:
    assert refused_at(lazily(), before + UNFIT) == len((before + UNFIT).encode()) - len("days")
    named_at = before + '{"name": "now", "arguments": {'
    assert refused_at(lazily(), named_at + '"a"') == len(named_at)


def test_a_marked_call_names_a_tool_and_is_closed() -> None:
    begun = '<tool_call>\n{"name": "'
    assert refused_at(lazily(), begun + "stranger") == len(begun)
    assert refused_at(lazily(), f"<tool_call>\n{CALL}\nDone.") == len(f"<tool_call>\n{CALL}\n")
    assert refused_at(lazily("named"), '[TOOL_CALLS]weather[ARGS]{"days') == len('[TOOL_CALLS]weather[ARGS]{"')
    assert refused_at(lazily("mistral"), f"[TOOL_CALLS][{UNFIT}") == len(f"[TOOL_CALLS][{UNFIT}") - len("days")


def test_an_answer_does_not_end_within_a_call() -> None:
    ids = [*CALL.encode()]
    assert refused_at(lazily(), [*ids[:-4], EOS]) == len(ids) - 4
    assert refused_at(lazily(), [*ids, EOS]) is None


def test_calls_in_thoughts_are_thoughts() -> None:
    assert refused_at(lazily("hermes+think"), f"<think>{UNFIT}</think>Hello") is None
    assert refused_at(lazily("hermes+think", prompt="<think>"), f"{UNFIT}</think>Hello") is None
    assert refused_at(lazily("hermes+think"), f"<think>Hm.</think>\n{UNFIT}") is not None


def test_tokens_that_reach_beyond_the_name_are_read_on() -> None:
    pieces = {piece: 256 + index for index, piece in enumerate(PieceWords.PIECES)}
    head = [*b'{"name": ', pieces[b'"weather", "'], *b"arguments"]
    assert refused_at(lazily(), [*head, pieces[b'": {"'], *b"city"]) is None
    assert refused_at(lazily(), [*head, pieces[b'": {}']]) == len(head)
    # What was written before the call could be noticed is not taken back: it is no call then, and the model is free.
    assert refused_at(lazily(), [*b'{"name": ', pieces[b'"weather", "'], *b'age": 3}']) is not None
    assert refused_at(lazily(), [*b'{"name": "weather', pieces[b'"}}'], *b" is JSON"]) is None


def test_without_parallel_calls_the_answer_ends_after_one() -> None:
    for text in (CALL, f"Well.\n{CALL}", f"<tool_call>\n{CALL}\n</tool_call>"):
        matcher, ids = lazily(is_parallel=False).matcher(), [*text.encode()]
        assert [matcher.accept_token(token_id) for token_id in ids] == [False] * (len(ids) - 1) + [True]
    assert not any(map(lazily().matcher().accept_token, CALL.encode()))


def test_the_position_follows_from_the_tokens_alone() -> None:
    lazy, ids = lazily(), [*f"Well.\n{UNFIT}".encode()]
    matcher = lazy.matcher()
    for length in (len(ids) - 4, 3, len(ids) - 6, 0, len(ids) - 4):
        mask, fresh = matcher.mask_after([1, 2, *ids[:length]], 2), lazy.matcher().mask_after(ids[:length], 0)
        assert (mask is None) == (fresh is None)
        assert mask is None or (mask == fresh).all()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]},
    ],
    ids=["remote reference", "nothing fits"],
)
def test_a_schema_no_grammar_can_follow_is_any_object_unless_it_is_strict(schema: dict[str, Any]) -> None:
    lazy = lazily(tools=[tool(parameters=schema)])
    assert refused_at(lazy, '{"name": "weather", "arguments": {"a": 3}}') is None
    assert refused_at(lazy, '{"name": "weather", "arguments": 3') is not None
    with pytest.raises(ConstraintError):
        lazily(tools=[tool(parameters=schema, strict=True)])


def test_what_cannot_be_compiled_is_remembered() -> None:
    fresh = ConstraintCompiler(PieceWords(), PieceWords.vocab_size)
    plan = OutputPlan.of(FORMS["json"], [tool(parameters={"type": "object", "allOf": [{"$ref": "https://e.com"}]})])
    for _ in range(3):
        plan.lazy_constraint(PieceWords(), [1], fresh.compile)  # type: ignore[arg-type]
    assert sum(fresh.compile_times.counts) == 2  # once for the schema, once for any object


def test_where_calls_are_forced_or_forbidden_nothing_waits() -> None:
    for choice in ("required", "none"):
        plan = OutputPlan.of(FORMS["json"], [tool()], choice)  # type: ignore[arg-type]
        assert plan.lazy_constraint(PieceWords(), [1], compiler().compile) is None  # type: ignore[arg-type]


WISHES = [
    '{"name": "weather", "arguments": {"days": 50, "city": 7}}',
    'Let me see.\n```json\n{"name": "weather", "arguments": "Oslo"}\n```',
    '<tool_call>\n{"name": "stranger", "arguments": []}\n</tool_call>',
]
PLAN = OutputPlan.of(FORMS["hermes"], [tool(), NOW])


def wishing(tokens: Sequence[int]) -> int:
    """A model that wants to answer prompt i with wish i, whatever it had to write so far."""
    wish = WISHES[tokens[0] - 1].encode()
    return wish[len(tokens) - 1] if len(tokens) <= len(wish) else EOS


def submit_wish(engine: Engine, number: int) -> Request:
    lazy = lazily()
    compiled = compiler(VOCAB).compile(lazy_grammar(FORMS["hermes"], PLAN.tools))
    params = SamplingParams(temperature=0.0, max_tokens=500)
    waiting = LazyConstraint(compiled, lazy.make_watch, lazy.token_bytes)
    return submitting.submit(engine, [number], params, constraint=waiting)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_whatever_a_model_wants_its_call_is_valid(number: int) -> None:
    engine = make_engine(wishing, num_blocks=200, context=600)
    request = submit_wish(engine, number)
    text = completion_of(run_to_end(engine), request).text
    parsed = PLAN.reader(PieceWords(), [1], "s").parse(text)
    assert parsed.tool_calls, text
    for call in parsed.tool_calls:
        schema = CITY if call.name == "weather" else NOW["function"]["parameters"]
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(call.arguments_json))


def test_a_preempted_call_is_the_same() -> None:
    alone = []
    for number in (1, 2, 3):
        engine = make_engine(wishing, num_blocks=200, context=600)
        request = submit_wish(engine, number)
        alone.append(completion_of(run_to_end(engine), request).token_ids)
    engine = make_engine(wishing, num_blocks=150, context=590)
    requests = [submit_wish(engine, number) for number in (1, 2, 3)]
    events = run_to_end(engine)
    assert engine.stats().preemptions > 0
    assert [completion_of(events, request).token_ids for request in requests] == alone
