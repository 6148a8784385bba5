"""The grammars that make a model call tools: required or named calls; and calls or text where the text has a format.

In the model's own format, so that what it writes is what it was trained to write.

    start:  (reasoning)? answer       answer:  marker calls
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.errors import InvalidParameter
from kvarn.server.chat.output.formats import CALL_ARGS, CALL_CLOSE, CALL_OPEN, TOOL_CALLS, OutputFormat
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, ToolSpec
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema
from kvarn.structured.schema_width import check_width

MAX_PARALLEL_CALLS = 16  # in one enforced answer: a small model may not stop by itself

# Models write JSON as Python's json.dumps does; free white space would let a small one write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_LENIENT = {**_WRITTEN, "lenient": True, "coerce_one_of": True}
_ANY = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written, in Lark: marker first unit (join unit)* last."""

    marker: str | None = None  # the text before all calls; None: they are the whole answer
    first: str = ""
    unit: str = "call"
    join: str = ""
    last: str = ""


def is_enforced(tools: Sequence[ToolSpec], choice: ToolChoice) -> bool:
    """Whether the answer must be calls; where the model is free, lazy_grammar.py enforces those it begins."""
    return bool(tools) and choice not in ("none", "auto")


def tool_constraint(
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    starts_in_reasoning: bool = False,
) -> Grammar | None:
    """The grammar of the answer, or None where the model is free."""
    if not is_enforced(tools, choice):
        return None
    wanted = [tool for tool in tools if not isinstance(choice, NamedFunction) or tool.name == choice.name]
    is_single = isinstance(choice, NamedFunction) or not is_parallel
    arguments = [_json(tool.arguments_schema, _WRITTEN) for tool in wanted]
    start = _start(format, starts_in_reasoning=starts_in_reasoning)
    return _grammar(*start, "answer: called", *_called(format, wanted, arguments, is_single=is_single))


@dataclass(frozen=True, slots=True)
class OptionalCalls:
    """Calls that a model may make; the schemas of tools that are not strict hold as far as llguidance follows them."""

    tools: Sequence[ToolSpec]
    is_parallel: bool = True
    is_loose: bool = False  # and not at all: any object

    def grammar(self, format: OutputFormat, *, starts_in_reasoning: bool) -> Grammar:
        """At least one call."""
        arguments = [self._arguments(tool) for tool in self.tools]
        called = _called(format, self.tools, arguments, is_single=not self.is_parallel)
        return _grammar(*_start(format, starts_in_reasoning=starts_in_reasoning), "answer: called", *called)

    def _arguments(self, tool: ToolSpec) -> str:
        if tool.is_strict:
            return _json(tool.arguments_schema, _WRITTEN)
        return _json({"type": "object"} if self.is_loose else tool.arguments_schema, _LENIENT)


def after_reasoning(format: OutputFormat, constraint: Constraint) -> Grammar:
    """The same constraint on what follows the reasoning that the prompt has opened."""
    if not isinstance(constraint, JsonSchema):
        raise InvalidParameter(
            "the prompt of this model opens its reasoning, and a pattern or grammar cannot wait for its end; use "
            "response_format, or turn the reasoning off in the template",
            field="constraint",
        )
    return formatted_text(format, constraint, starts_in_reasoning=True)


def formatted_text(format: OutputFormat, schema: JsonSchema, *, starts_in_reasoning: bool) -> Grammar:
    """JSON on one line, so that no part of it can be taken for a call, which begins a line."""
    start = _start(format, starts_in_reasoning=starts_in_reasoning)
    return _grammar(*start, f"answer: {_json(json.loads(schema.text), _WRITTEN)}")


def _grammar(*rules: str) -> Grammar:
    return Grammar("\n".join(rules) + "\n")


def _json(schema: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    check_width(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"


def _called(format: OutputFormat, tools: Sequence[ToolSpec], arguments: Sequence[str], *, is_single: bool) -> list[str]:
    """The rules of calls with everything around them."""
    assert format.tool_format is not None
    form = _form(format)
    more = "" if is_single else f"({form.join} {form.unit}){{0,{MAX_PARALLEL_CALLS - 1}}}"
    return [
        f"called: {marked(format, form.marker)} calls",
        f"calls: {form.first} {form.unit} {more} {form.last}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
        *(_call(format, index, tool.name) for index, tool in enumerate(tools)),
        *(f"arguments_{index}: {one}" for index, one in enumerate(arguments)),
    ]


def _form(format: OutputFormat) -> _Form:
    match format.tool_format:
        case "hermes":
            close = marked(format, CALL_CLOSE)
            return _Form(CALL_OPEN, unit=rf'"\n" call "\n" {close}', join=rf'"\n" {marked(format, CALL_OPEN)}')
        case "mistral" if format.names_before_arguments:
            return _Form(TOOL_CALLS, join=marked(format, TOOL_CALLS))
        case "mistral":
            return _Form(TOOL_CALLS, first='"["', join='", "', last='"]"')
        case "llama3":
            return _Form(join='"; "')
        case _:
            return _Form(join=r'"\n"')


def _start(format: OutputFormat, *, starts_in_reasoning: bool) -> list[str]:
    """Forced calls begin at once, unless the prompt has opened the reasoning: that is closed first."""
    if format.reasoning is None or not starts_in_reasoning:
        return ["start: answer"]
    closed, rules = format.reasoning.close, ["start: thought answer", r"WHITE: /[\r\n]*/"]
    if format.marker_id(closed) is None:
        return [*rules, "thought: reasoning WHITE", f"reasoning[lazy]: {_ANY} {quoted(closed)}"]
    return [*rules, f"thought: THOUGHT {marked(format, closed)} WHITE", f"THOUGHT: {_ANY}"]


def _call(format: OutputFormat, index: int, name: str) -> str:
    if format.names_before_arguments:
        return f"call_{index}: {quoted(name)} {marked(format, CALL_ARGS)} arguments_{index}"
    key = "parameters" if format.tool_format == "llama3" else "arguments"
    head = quoted(f'{{"name": "{name}", "{key}": ')
    return f'call_{index}: {head} arguments_{index} "}}"'


def marked(format: OutputFormat, marker: str | None) -> str:
    """A control token by its id, anything else as text."""
    if marker is None:
        return ""
    token_id = format.marker_id(marker)
    return quoted(marker) if token_id is None else f"<[{token_id}]>"


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)
