"""How a model writes tool calls and reasoning: found out once, from its chat template. Knows no request and no text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

ToolFormat = Literal["hermes", "llama3", "mistral", "json"]

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"  # hermes: Qwen, Hermes and many others
PYTHON_TAG = "<|python_tag|>"  # llama3
TOOL_CALLS, CALL_ID, CALL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"  # mistral

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (CALL_OPEN, CALL_CLOSE),
    "llama3": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, CALL_ID, CALL_ARGS),
    "json": (),
}

_REFUSES_SYSTEM = re.compile(r"raise_exception\(\s*['\"]System role not supported")
# Calls inside <tool_call> that are not JSON: <function=name>, <arg_key>, <invoke name=...>.
_OTHER_CALLS = ("<function=", "<arg_key>", "<invoke", "<parameter=")
# Plain Llama 3 announces its format to the model in these words, with or without the python tag.
_LLAMA3_FORMAT = re.compile(r'Respond in the format \{"name": function name, "parameters"')


class SpecialTokens(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def is_control(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Tags:
    """The two texts around a model's reasoning."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")
BRACKET_THINK = Tags("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one model writes what is not plain content."""

    tool_format: ToolFormat | None = None  # None: it has none, or one that is not read here
    reasoning: Tags | None = None
    shows_tools: bool = False  # the template writes the tools into the prompt; else Kvarn's documented text does
    names_before_arguments: bool = False  # the newer Mistral form: name[ARGS]{...}
    takes_system: bool = True  # the template accepts a system message
    marker_ids: tuple[tuple[str, int], ...] = ()  # markers that are control tokens of the model

    def marker_id(self, marker: str) -> int | None:
        """The control token a marker is, or None where it is plain text."""
        return next((token_id for text, token_id in self.marker_ids if text == marker), None)

    def visible_ids(self, *, has_tools: bool) -> frozenset[int]:
        """Control tokens that must stay in the text, so that calls and reasoning can be found in it."""
        wanted = set(_tag_texts(self.reasoning))
        if has_tools and self.tool_format is not None:
            wanted.update(MARKERS[self.tool_format])
        return frozenset(token_id for text, token_id in self.marker_ids if text in wanted)


def detect_format(chat_template: str | None, tokenizer: SpecialTokens) -> OutputFormat:
    """Return the format a chat template shows to its model."""
    if chat_template is None:
        return OutputFormat()
    template = _without_comments(chat_template)
    tool_format, shows_tools = _tool_format(template)
    reasoning = _reasoning(template)
    markers = (*(MARKERS[tool_format] if tool_format else ()), *_tag_texts(reasoning))
    return OutputFormat(
        tool_format=tool_format,
        reasoning=reasoning,
        shows_tools=shows_tools,
        names_before_arguments=tool_format == "mistral" and CALL_ARGS in template,
        takes_system=_REFUSES_SYSTEM.search(template) is None,
        marker_ids=tuple(found for marker in markers for found in _control_token(marker, tokenizer)),
    )


def _tool_format(template: str) -> tuple[ToolFormat | None, bool]:
    """The format, and whether the template shows tools itself."""
    if not re.search(r"\btools\b", template):
        return "json", False
    if TOOL_CALLS in template:
        return "mistral", True
    if CALL_OPEN in template:
        return (None if any(form in template for form in _OTHER_CALLS) else "hermes"), True
    if _LLAMA3_FORMAT.search(template):
        return "llama3", True
    return None, True


def _reasoning(template: str) -> Tags | None:
    for tags in (THINK, BRACKET_THINK):
        if tags.open in template or tags.close in template:
            return tags
    return None


def _tag_texts(tags: Tags | None) -> tuple[str, ...]:
    return () if tags is None else (tags.open, tags.close)


def _control_token(marker: str, tokenizer: SpecialTokens) -> list[tuple[str, int]]:
    ids = tokenizer.encode(marker, add_special=False, parse_special=True)
    return [(marker, ids[0])] if len(ids) == 1 and tokenizer.is_control(ids[0]) else []


def _without_comments(template: str) -> str:
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
