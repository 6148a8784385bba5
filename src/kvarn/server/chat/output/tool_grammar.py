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
from kvarn.server.chat.output.call_forms.form import Piece, Word
from kvarn.server.chat.output.call_forms.grammar import ArgumentsGrammar, literal_rules
from kvarn.server.chat.output.call_forms.lark import json_value, marked, quoted, text_until
from kvarn.server.chat.output.call_forms.writer import is_json
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, ToolSpec
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema
from kvarn.structured.schema_width import check_width

MAX_PARALLEL_CALLS = 16  # in one enforced answer: a small model may not stop by itself

# Models write JSON as Python's json.dumps does; free white space would let a small one write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_LENIENT = {**_WRITTEN, "lenient": True, "coerce_one_of": True}


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
    arguments = [(tool.arguments_schema, _WRITTEN) for tool in wanted]
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

    def _arguments(self, tool: ToolSpec) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The schema, and how closely it is followed."""
        if tool.is_strict:
            return tool.arguments_schema, _WRITTEN
        return {"type": "object"} if self.is_loose else tool.arguments_schema, _LENIENT


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
    final = marked(format, "<|channel|>final<|message|>") if format.is_harmony else ""
    return _grammar(*start, f"answer: {final} text", f"text: {_json(json.loads(schema.text), _WRITTEN)}")


def _grammar(*rules: str) -> Grammar:
    return Grammar("\n".join(rules) + "\n")


def _json(schema: Mapping[str, Any], guidance: Mapping[str, Any]) -> str:
    check_width(schema)
    return json_value(schema, guidance)


def _called(
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    arguments: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    is_single: bool,
) -> list[str]:
    """The rules of calls with everything around them."""
    rules = [
        *_calls(format, is_single=is_single or format.is_harmony),
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
        *(_call(format, index, tool.name) for index, tool in enumerate(tools)),
    ]
    for index, (schema, guidance) in enumerate(arguments):
        check_width(schema)
        rules += ArgumentsGrammar(format, f"arguments_{index}", schema, guidance).rules()
    return rules + (literal_rules(format) if format.form.body in ("python", "gemma") else [])


def _calls(format: OutputFormat, *, is_single: bool) -> list[str]:
    """begin call (join call)* end, or (begin call end) (between begin call end)*."""
    form = format.form
    begin, end = "" if form.is_bare else marked(format, form.begin), marked(format, "".join(form.end))
    is_list = is_json(format.form) and form.join == ", "
    first, last = ('"["', '"]"') if is_list else ("", "")
    more = "" if is_single else "({0} {1}){{0,{2}}}"
    if form.holds_many or form.is_bare:
        more = more.format(marked(format, form.join), "call", MAX_PARALLEL_CALLS - 1)
        return [f"called: {begin} {first} call {more} {last} {end}"]
    more = more.format(marked(format, form.between), "section", MAX_PARALLEL_CALLS - 1)
    return [f"called: section {more}", f"section: {begin} call {end}"]


def _start(format: OutputFormat, *, starts_in_reasoning: bool) -> list[str]:
    """Forced calls begin at once, unless the prompt has opened the reasoning: that is closed first."""
    if format.is_harmony:
        return _harmony_start(format)
    if format.reasoning is None or not starts_in_reasoning:
        return ["start: answer"]
    rule, thought = text_until(format, "reasoning", format.reasoning.close)
    return ["start: thought answer", r"WHITE: /[\r\n]*/", f"thought: {thought} WHITE", rule]


def _harmony_start(format: OutputFormat) -> list[str]:
    """A message of reasoning may stand before the one that is wanted."""
    rule, thought = text_until(format, "reasoning", "<|end|>")
    opening, again = marked(format, "<|channel|>analysis<|message|>"), marked(format, "<|start|>assistant")
    return ["start: thought? answer", f"thought: {opening} {thought} {again}", rule]


def _call(format: OutputFormat, index: int, name: str) -> str:
    form = format.form
    head, after = (" ".join(_piece(format, piece) for piece in pieces) for pieces in (form.head, form.after_name))
    if is_json(form):
        named = quoted(f'"{form.name_key}": "{name}", "{form.arguments_key}": ')
        return f'call_{index}: "{{" {head} {named} arguments_{index} "}}"'
    return f"call_{index}: {head} {quoted(name)} {after} arguments_{index} {marked(format, ''.join(form.tail))}"


def _piece(format: OutputFormat, piece: Piece) -> str:
    match piece:
        case str():
            return marked(format, piece)
        case Word():
            return "/[0-9]{1,4}/"
        case _:
            return ""
