"""How a model writes tool calls and reasoning: found out once, from its chat template. Knows no request and no text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvarn.server.chat.output.call_forms.detect import Tags, find_reasoning, find_tool_format
from kvarn.server.chat.output.call_forms.form import CallForm
from kvarn.server.chat.output.call_forms.table import FORMS, ToolFormat

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_REFUSES_SYSTEM = re.compile(r"raise_exception\(\s*['\"]System role not supported")

_SYSTEM_TOOLS = re.compile(r"['\"]tools['\"] in message and message\[['\"]tools['\"]\]")


class SpecialTokens(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def is_control(self, token_id: int) -> bool: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one model writes what is not plain content."""

    tool_format: ToolFormat | None = None  # None: it has none, or one that is not read here
    reasoning: Tags | None = None
    shows_tools: bool = False  # the template writes the tools into the prompt; else Kvarn's documented text does
    takes_system: bool = True  # the template accepts a system message
    writes_calls: bool = True  # the template writes earlier calls; else they are written into the content
    wants_system_tools: bool = False  # it takes the tools from the system message, as JSON
    marker_ids: tuple[tuple[str, int], ...] = ()  # markers that are control tokens of the model

    @property
    def form(self) -> CallForm:
        """How calls are written."""
        assert self.tool_format is not None
        return FORMS[self.tool_format]

    @property
    def is_harmony(self) -> bool:
        """Whether every part of an answer is a message of its own, with a channel."""
        return self.tool_format == "harmony"

    @property
    def is_mistral(self) -> bool:
        """Whether the ids of calls have nine characters."""
        return self.tool_format in ("mistral", "mistral_names")

    def marker_id(self, marker: str) -> int | None:
        """The control token a marker is, or None where it is plain text."""
        return next((token_id for text, token_id in self.marker_ids if text == marker), None)

    def visible_ids(self, *, has_tools: bool) -> frozenset[int]:
        """Control tokens that must stay in the text, so that calls and reasoning can be found in it."""
        wanted = list(_reasoning_texts(self.reasoning, self.tool_format))
        if has_tools and self.tool_format is not None:
            wanted += self.form.texts()
        return frozenset(token_id for marker, token_id in self.marker_ids if any(marker in text for text in wanted))


def detect_format(chat_template: str | None, tokenizer: SpecialTokens) -> OutputFormat:
    """Return the format a chat template shows to its model."""
    if chat_template is None:
        return OutputFormat()
    template = _without_comments(chat_template)
    shows_tools = re.search(r"\btools\b", template) is not None
    tool_format = find_tool_format(template)
    if tool_format is None and not shows_tools:
        tool_format = "json"
    reasoning = find_reasoning(template)
    texts = [*_reasoning_texts(reasoning, tool_format), *(FORMS[tool_format].texts() if tool_format else ())]
    return OutputFormat(
        tool_format=tool_format,
        reasoning=reasoning,
        shows_tools=shows_tools,
        takes_system=_REFUSES_SYSTEM.search(template) is None,
        writes_calls="tool_calls" in template,
        wants_system_tools=_SYSTEM_TOOLS.search(template) is not None,
        marker_ids=tuple(dict.fromkeys(found for text in texts for found in _control_tokens(text, tokenizer))),
    )


def _reasoning_texts(reasoning: Tags | None, tool_format: ToolFormat | None) -> tuple[str, ...]:
    if tool_format == "harmony":
        return HARMONY_MARKERS
    return () if reasoning is None else (reasoning.open, reasoning.close)


def _control_tokens(text: str, tokenizer: SpecialTokens) -> Iterator[tuple[str, int]]:
    """The control tokens in a text."""
    for token_id in tokenizer.encode(text, add_special=False, parse_special=True):
        if tokenizer.is_control(token_id) and tokenizer.token_text(token_id) in text:
            yield tokenizer.token_text(token_id), token_id


def _without_comments(template: str) -> str:
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
