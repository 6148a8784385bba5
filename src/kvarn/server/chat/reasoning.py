"""How much a model shall think: levels of effort as the arguments that its chat template reads.

Templates of gpt-oss and its like read a level, those of Qwen3 and its like a switch; most read neither. A level is a
hint: where nothing reads it, the answer comes without, and a header says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.request_context import RequestContext

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCH = "enable_thinking"  # the name templates give to it, Qwen3's for one
LEVEL = "reasoning_effort"
LEVELS: Mapping[Effort, str] = {  # templates know the three in the middle
    **{"none": "low", "minimal": "low", "low": "low"},
    **{"medium": "medium", "high": "high", "xhigh": "high", "max": "high"},
}


def reads(template: str, name: str) -> bool:
    """Whether a chat template has a use for an argument of this name."""
    return re.search(rf"\b{name}\b", template) is not None


def effort_kwargs(effort: Effort, template: str) -> dict[str, Any]:
    """The template arguments that ask for an effort; none where the template reads no such thing."""
    wanted: dict[str, Any] = {LEVEL: LEVELS[effort], SWITCH: effort != "none"}
    return {name: value for name, value in wanted.items() if reads(template, name)}


def with_effort(request: RequestContext, model: ServedModel, chat: Conversation, field: str) -> Conversation:
    """The conversation with its effort told to the template; arguments that the caller gives by name win.

    field: what the dialect calls it, for the warning.
    """
    effort = chat.reasoning_effort
    if effort is None:
        return chat
    kwargs = effort_kwargs(effort, model.llm.llm.tokenizer.chat_template or "")
    is_silent = effort == "none" and model.output_format.reasoning is None
    if not kwargs and not is_silent:
        request.warn(f"ignored: {field}, which this model's chat template does not read")
    return replace(chat, template_kwargs={**kwargs, **(chat.template_kwargs or {})}) if kwargs else chat
