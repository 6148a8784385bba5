"""The grammar that makes a model call tools: required or named calls, strict schemas, one call at most.

In the model's own format, so that what it writes is what it was trained to write.

    start:  (reasoning)? answer       answer:  text? marker calls, or text alone where the model is free
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.formats import CALL_ARGS, CALL_CLOSE, CALL_OPEN, PYTHON_TAG, TOOL_CALLS, OutputFormat
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, ToolSpec
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema

MAX_PARALLEL_CALLS = 16  # in one enforced answer: a small model may not stop by itself

# Models write JSON as Python's json.dumps does; free white space would let a small one write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_ANY = r"/(.|\n)*/"
_SPACE = r"[ \t\r\n]*"
_NOT_JSON = r"/[ \t\r\n]*([^ \t\r\n\[{](.|\n)*)?/"


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written, in Lark: marker first unit (join unit)* last."""

    marker: str | None = None  # the text before all calls; None: they are the whole answer
    first: str = ""
    unit: str = "call"
    join: str = ""
    last: str = ""


def is_enforced(tools: Sequence[ToolSpec], choice: ToolChoice, *, is_parallel: bool) -> bool:
    """Whether a grammar decides what calls look like; without one, the model may write any text."""
    if not tools or choice == "none":
        return False
    return choice != "auto" or not is_parallel or any(tool.is_strict for tool in tools)


def tool_constraint(
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    starts_in_reasoning: bool = False,
) -> Grammar | None:
    """The grammar of the answer, or None where the model is free."""
    if not is_enforced(tools, choice, is_parallel=is_parallel):
        return None
    assert format.tool_format is not None
    is_free = choice == "auto"
    form = _form(format)
    wanted = [tool for tool in tools if not isinstance(choice, NamedFunction) or tool.name == choice.name]
    is_single = isinstance(choice, NamedFunction) or not is_parallel
    more = "" if is_single else f"({form.join} {form.unit}){{0,{MAX_PARALLEL_CALLS - 1}}}"
    rules = [
        *_start(format, starts_in_reasoning=starts_in_reasoning, is_free=is_free),
        *(_free_answer(format, form) if is_free else [f"answer: {_marker(format, form.marker)} calls"]),
        f"calls: {form.first} {form.unit} {more} {form.last}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(wanted))),
    ]
    for index, tool in enumerate(wanted):
        rules += _call(format, index, tool, has_schema=not is_free or tool.is_strict)
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
    rules = _start(format, starts_in_reasoning=True, is_free=False)
    return Grammar("\n".join([*rules, f"answer: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}"]) + "\n")


def _form(format: OutputFormat) -> _Form:
    match format.tool_format:
        case "hermes":
            close = _marker(format, CALL_CLOSE)
            return _Form(CALL_OPEN, unit=rf'"\n" call "\n" {close}', join=rf'"\n" {_marker(format, CALL_OPEN)}')
        case "mistral" if format.names_before_arguments:
            return _Form(TOOL_CALLS, join=_marker(format, TOOL_CALLS))
        case "mistral":
            return _Form(TOOL_CALLS, first='"["', join='", "', last='"]"')
        case "llama3":
            return _Form(join='"; "')
        case _:
            return _Form(join=r'"\n"')


def _start(format: OutputFormat, *, starts_in_reasoning: bool, is_free: bool) -> list[str]:
    """Reasoning is closed before the answer begins; forced calls begin at once, unless the prompt has opened it."""
    if format.reasoning is None or not (starts_in_reasoning or is_free):
        return ["start: answer"]
    opened, closed = format.reasoning.open, format.reasoning.close
    rules = ["start: thought answer" if starts_in_reasoning else "start: thought? answer"]
    if format.marker_id(closed) is None:
        begin = "" if starts_in_reasoning else f"/{_SPACE}/ {_quoted(opened)} "
        return [*rules, "thought: reasoning WHITE", f"reasoning[lazy]: {begin}{_ANY} {_quoted(closed)}", _newlines()]
    begin = "" if starts_in_reasoning else f"{_marker(format, opened)} "
    return [*rules, f"thought: {begin}THOUGHT {_marker(format, closed)} WHITE", f"THOUGHT: {_ANY}", _newlines()]


def _newlines() -> str:
    return r"WHITE: /[\r\n]*/"


def _free_answer(format: OutputFormat, form: _Form) -> list[str]:
    """Text without anything that looks like a call, or real calls."""
    if form.marker is None:
        excluded = "" if format.tool_format != "llama3" else rf" & ~({_ANY} {_quoted(PYTHON_TAG)} {_ANY})"
        return ["answer: calls | TEXT", f"TEXT: {_NOT_JSON}{_without_reasoning(format)}{excluded}"]
    text = f"TEXT: {_ANY}{_without_reasoning(format)}"
    if format.marker_id(form.marker) is not None:
        return [f"answer: TEXT ({_marker(format, form.marker)} calls)?", text]
    head = f"HEAD: ({_ANY} {_quoted(form.marker)}){_without_reasoning(format)}"
    return ["answer: TEXT | head calls", "head[lazy]: HEAD", head, text]


def _without_reasoning(format: OutputFormat) -> str:
    """Text does not begin with the tag of reasoning, which has a rule of its own."""
    if format.reasoning is None or format.marker_id(format.reasoning.open) is not None:
        return ""
    return f" & ~(/{_SPACE}/ {_quoted(format.reasoning.open)} {_ANY})"


def _call(format: OutputFormat, index: int, tool: ToolSpec, *, has_schema: bool) -> list[str]:
    schema = {**(tool.arguments_schema if has_schema else {"type": "object"}), "x-guidance": _WRITTEN}
    arguments = f"arguments_{index}: %json {json.dumps(schema)}"
    if format.names_before_arguments:
        return [f"call_{index}: {_quoted(tool.name)} {_marker(format, CALL_ARGS)} arguments_{index}", arguments]
    key = "parameters" if format.tool_format == "llama3" else "arguments"
    head = _quoted(f'{{"name": "{tool.name}", "{key}": ')
    return [f'call_{index}: {head} arguments_{index} "}}"', arguments]


def _marker(format: OutputFormat, marker: str | None) -> str:
    """A control token by its id, anything else as text."""
    if marker is None:
        return ""
    token_id = format.marker_id(marker)
    return _quoted(marker) if token_id is None else f"<[{token_id}]>"


def _quoted(text: str) -> str:
    return json.dumps(text)
