"""The grammar of a call that a free model has begun: its arguments follow the schema of the tool it names.

start:  part of a call, chosen by a prefix that is never written; see BegunCall
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.errors import ConstraintError
from kvarn.server.chat.output.call_candidate import OPENINGS
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import OutputStream
from kvarn.server.chat.output.tool_grammar import marked, quoted
from kvarn.server.chat.output.tools import ToolSpec
from kvarn.structured.compiler import CompiledConstraint
from kvarn.structured.constraints import Constraint, Grammar
from kvarn.structured.lazy_matcher import Trigger
from kvarn.structured.schema_width import check_width

Compile = Callable[[Constraint], CompiledConstraint]
_SPACE = r"[ \t\r\n]{0,32}"  # bounded: a small model may write nothing else
_HEAD = rf'/{_SPACE}"name"{_SPACE}:{_SPACE}"/'
_KEY = rf'/{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:{_SPACE}/'
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
    assert format.tool_format is not None
    close = OPENINGS[format.tool_format].close
    parts = [f"{quoted(prefix_of('call', None))} call"]
    if close:
        parts.append(f"{quoted(prefix_of('call', None, is_closed=True))} call SPACE {marked(format, close)}")
    rules = [
        "call: HEAD (" + " | ".join(f"named_{index}" for index in range(len(tools))) + ")",
        f"HEAD: {_HEAD}",
        f"KEY: {_KEY}",
        f"SPACE: /{_SPACE}/",
        rf"END: /{_SPACE}\}}\n?/",
    ]
    for index, tool in enumerate(tools):
        rules += [
            "named_{0}: {1} rest_{0}".format(index, quoted(tool.name + '"')),
            f"rest_{index}: KEY arguments_{index} END",
            f"arguments_{index}: %json {json.dumps(_schema(tool, is_loose=is_loose))}",
        ]
        parts += [f"{quoted(prefix_of(part, tool.name))} {part}_{index}" for part in ("rest", "arguments")]
    return Grammar("\n".join(["start: " + " | ".join(parts), *rules]) + "\n")


def prefix_of(part: str, name: str | None, *, is_closed: bool = False) -> str:
    """What the grammar begins with for one part of a call; no name of a tool has a space."""
    return f"{part} {name or ''} {'closed' if is_closed else ''};"


@dataclass(frozen=True, slots=True)
class StreamWatch:
    """The parser of the answer, as a watch of calls."""

    stream: OutputStream

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


def _schema(tool: ToolSpec, *, is_loose: bool) -> dict[str, Any]:
    if tool.is_strict or not is_loose:
        check_width(tool.arguments_schema)
    if tool.is_strict:
        return {**tool.arguments_schema, "x-guidance": _STRICT}
    return {**(ANY_OBJECT if is_loose else tool.arguments_schema), "x-guidance": _LENIENT}
