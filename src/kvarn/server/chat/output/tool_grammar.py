"""The grammar that makes a model call tools: required or named calls.

In the model's own format, so that what it writes is what it was trained to write.

    start:  (reasoning)? answer       answer:  marker calls
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.formats import CALL_ARGS, CALL_CLOSE, CALL_OPEN, TOOL_CALLS, OutputFormat
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, ToolSpec
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema

MAX_PARALLEL_CALLS = 16  # in one enforced answer: a small model may not stop by itself

# Models write JSON as Python's json.dumps does; free white space would let a small one write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
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
    assert format.tool_format is not None
    form = _form(format)
    wanted = [tool for tool in tools if not isinstance(choice, NamedFunction) or tool.name == choice.name]
    is_single = isinstance(choice, NamedFunction) or not is_parallel
    more = "" if is_single else f"({form.join} {form.unit}){{0,{MAX_PARALLEL_CALLS - 1}}}"
    rules = [
        *_start(format, starts_in_reasoning=starts_in_reasoning),
        f"answer: {marked(format, form.marker)} calls",
        f"calls: {form.first} {form.unit} {more} {form.last}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(wanted))),
    ]
    for index, tool in enumerate(wanted):
        rules += _call(format, index, tool)
    return Grammar("\n".join(rules) + "\n")


def after_reasoning(format: OutputFormat, constraint: Constraint) -> Grammar:
    """The same constraint on what follows the reasoning that the prompt has opened."""
    if not isinstance(constraint, JsonSchema):
        raise InvalidField(
            "the prompt of this model opens its reasoning, and a pattern or grammar cannot wait for its end; use "
            "response_format, or turn the reasoning off in the template",
            None,
        )
    schema = json.loads(constraint.text)
    rules = _start(format, starts_in_reasoning=True)
    return Grammar("\n".join([*rules, f"answer: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}"]) + "\n")


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


def _call(format: OutputFormat, index: int, tool: ToolSpec) -> list[str]:
    schema = {**tool.arguments_schema, "x-guidance": _WRITTEN}
    arguments = f"arguments_{index}: %json {json.dumps(schema)}"
    if format.names_before_arguments:
        return [f"call_{index}: {quoted(tool.name)} {marked(format, CALL_ARGS)} arguments_{index}", arguments]
    key = "parameters" if format.tool_format == "llama3" else "arguments"
    head = quoted(f'{{"name": "{tool.name}", "{key}": ')
    return [f'call_{index}: {head} arguments_{index} "}}"', arguments]


def marked(format: OutputFormat, marker: str | None) -> str:
    """A control token by its id, anything else as text."""
    if marker is None:
        return ""
    token_id = format.marker_id(marker)
    return quoted(marker) if token_id is None else f"<[{token_id}]>"


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)
