"""The grammar of a call that a free model has begun: its arguments follow the schema of the tool it names.

start:  part of a call, chosen by a prefix that is never written; see BegunCall
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.errors import ConstraintError
from kvarn.server.chat.output.call_forms.grammar import ArgumentsGrammar, literal_rules
from kvarn.server.chat.output.call_forms.lark import SPACE, json_value, marked, quoted
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.harmony_stream import AnswerReader
from kvarn.server.chat.output.tools import ToolSpec
from kvarn.structured.compiler import CompiledConstraint
from kvarn.structured.constraints import Constraint, Grammar
from kvarn.structured.lazy_matcher import Trigger
from kvarn.structured.schema_width import check_width

Compile = Callable[[Constraint], CompiledConstraint]
_ID = rf'"tool_call_id"{SPACE}:{SPACE}"[0-9]{{1,4}}"{SPACE},{SPACE}'
_HEAD = rf'/{SPACE}({_ID})?"(tool_)?name"{SPACE}:{SPACE}"/'
_KEY = rf'/{SPACE},{SPACE}"(arguments|parameters)"{SPACE}:{SPACE}/'
# What the schema of a tool that is not strict says beyond llguidance is left to the tool.
_LENIENT = {"whitespace_pattern": r"[ \n\t]{1,32}", "lenient": True, "coerce_one_of": True}
_STRICT = {"whitespace_pattern": r"[ \n\t]{1,32}", "lenient": False}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def compile_lazily(compile: Compile, format: OutputFormat, tools: Sequence[ToolSpec]) -> CompiledConstraint:
    """The grammar for all tools; where it cannot be compiled, with any object for those that are not strict."""
    try:
        return compile(lazy_grammar(format, tools))
    except ConstraintError:
        return compile(lazy_grammar(format, tools, is_loose=True))


def lazy_grammar(format: OutputFormat, tools: Sequence[ToolSpec], *, is_loose: bool = False) -> Grammar:
    """Every part of a call of one of the tools."""
    form = format.form
    parts = [f"{quoted(prefix_of('call', None))} call"]
    if form.end:
        close = marked(format, "".join(form.end).strip())
        parts.append(f"{quoted(prefix_of('call', None, is_closed=True))} call SPACE {close}")
    rules = [
        "call: HEAD (" + " | ".join(f"named_{index}" for index in range(len(tools))) + ")",
        f"HEAD: {_HEAD}",
        f"KEY: {_KEY}",
        f"SPACE: /{SPACE}/",
        rf"END: /{SPACE}\}}\n?/",
    ]
    for index, tool in enumerate(tools):
        schema, guidance = _schema(tool, is_loose=is_loose)
        rules += [
            "named_{0}: {1} rest_{0}".format(index, quoted(tool.name + '"')),
            f"rest_{index}: KEY object_{index} END",
            f"object_{index}: {json_value(schema, guidance)}",
        ]
        parts.append(f"{quoted(prefix_of('rest', tool.name))} rest_{index}")
        parts.append(f"{quoted(prefix_of('arguments', tool.name))} arguments_{index}")
        if form.body in ("json", "object"):
            rules.append(f"arguments_{index}: object_{index}")
        else:
            rules.append(f"arguments_{index}: SPACE body_{index} SPACE {_closing(format)}")
            rules += ArgumentsGrammar(format, f"body_{index}", schema, guidance, is_flexible=True).rules()
    rules += literal_rules(format) if form.body in ("python", "gemma") else []
    return Grammar("\n".join(["start: " + " | ".join(parts), *rules]) + "\n")


def _closing(format: OutputFormat) -> str:
    """What ends the arguments."""
    return marked(format, (format.form.tail or format.form.end)[0].strip())


def prefix_of(part: str, name: str | None, *, is_closed: bool = False) -> str:
    """What the grammar begins with for one part of a call; no name of a tool has a space."""
    return f"{part} {name or ''} {'closed' if is_closed else ''};"


@dataclass(frozen=True, slots=True)
class StreamWatch:
    """The parser of the answer, as a watch of calls."""

    stream: AnswerReader

    def push(self, text: str) -> None:
        self.stream.push(text)

    @property
    def num_calls(self) -> int:
        return self.stream.num_calls

    @property
    def trigger(self) -> Trigger | None:
        begun = self.stream.begun
        if begun is None:
            return None
        return Trigger(prefix_of(begun.part, begun.name, is_closed=begun.is_closed), begun.at, begun.written)


def _schema(tool: ToolSpec, *, is_loose: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The schema of the arguments, and how closely it is followed."""
    if tool.is_strict or not is_loose:
        check_width(tool.arguments_schema)
    if tool.is_strict:
        return tool.arguments_schema, _STRICT
    return ANY_OBJECT if is_loose else tool.arguments_schema, _LENIENT
