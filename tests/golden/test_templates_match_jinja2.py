"""Chat templates of real models give what jinja2, set up as transformers does it, makes of them.

Two differences are known and kept: where jinja2's `safe` strings escape what is added to them, and where a template
writes None for a message without content; neither is what the template's author meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import pytest
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvarn.errors import TemplateError
from kvarn.tokenizer.chat.template_worker import TemplateLimits, TemplateWorker
from tests.assets import llama_cpp_models

pytestmark = pytest.mark.model

SYSTEM = {"role": "system", "content": " Be kind. "}
USER = {"role": "user", "content": 'Hi <there> "you" é\n  two'}
ANSWER = {"role": "assistant", "content": "Hello!"}
FUNCTION = {
    "name": "get_weather",
    "description": 'Weather <now> & "then" in é',
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city"},
            "days": {"type": "integer", "enum": [1, 2]},
        },
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
NESTED = {"city": 'O\'slo "é"\n', "days": 3, "more": {"a": [1, None, True, 2.5], "b": {}}, "tags": ["x y", "日本"]}
REASONED = {
    **{"role": "assistant", "content": "", "reasoning_content": "hm\nso", "thinking": "hm\nso"},
    "tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": NESTED}}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"t": 3}'}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [SYSTEM, USER, ANSWER, USER]},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tools without system": {"messages": [USER], "tools": TOOLS},
    "tool call": {"messages": [USER, CALLING, RESULT, ANSWER, USER], "tools": TOOLS},
    "tool result": {"messages": [USER, CALLING, RESULT], "tools": TOOLS},
    "nested call": {"messages": [SYSTEM, USER, REASONED, RESULT], "tools": TOOLS},
    "several turns": {"messages": [USER, REASONED, RESULT, ANSWER, USER, REASONED, RESULT], "tools": TOOLS},
    "silent call": {"messages": [USER, {**CALLING, "content": None}, RESULT], "tools": TOOLS},
    "thinking": {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, USER]},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}, USER]},
    "thinking off": {"messages": [USER], "enable_thinking": False},
    "thinking on": {"messages": [USER], "enable_thinking": True},
    "developer": {"messages": [{"role": "developer", "content": "Dev"}, USER]},
}

ESCAPES_SAFE_STRINGS = {"meetkai-functionary-medium-v3.1.jinja"}
WRITES_NONE = {"GLM-4.6.jinja", "GLM-4.7-Flash.jinja", "MiniMax-M2.jinja"}


class Generation(Extension):
    """{% generation %}, as transformers has it, without the bookkeeping."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return str(caller())


@cache
def environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return made


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(TemplateLimits(deadline_s=5.0))  # a busy machine is not what is tested here
    yield worker
    worker.close()


def templates() -> list[Path]:
    return sorted((llama_cpp_models() / "templates").glob("*.jinja"))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_real_templates_write_what_jinja2_writes(conversation: str, worker: TemplateWorker) -> None:
    context = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **CONVERSATIONS[conversation]}
    compared, different = 0, {}
    for path in templates():
        source = path.read_text(encoding="utf-8")
        expected = with_jinja2(source, context)
        if expected is None or is_known_difference(path.name, conversation):
            continue
        compared += 1
        found = with_kvarn(worker, source, context)
        if found != expected:
            different[path.name] = (expected, found)
    assert not different
    assert compared >= 45


def is_known_difference(name: str, conversation: str) -> bool:
    has_tools = "tools" in CONVERSATIONS[conversation]
    return (name in ESCAPES_SAFE_STRINGS and has_tools) or (name in WRITES_NONE and conversation == "silent call")


def with_jinja2(source: str, context: dict[str, Any]) -> str | None:
    """Return None where jinja2 itself fails: there is nothing to agree with."""
    try:
        return compiled(source).render(**json.loads(json.dumps(context)))
    except Exception:
        return None


@cache
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def with_kvarn(worker: TemplateWorker, source: str, context: dict[str, Any]) -> str:
    try:
        return worker.render(source, context)
    except TemplateError as error:
        return f"failed: {error}"
