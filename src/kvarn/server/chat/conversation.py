"""A conversation as every API dialect hands it on: messages, sampling parameters, tools. Knows no body and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarn.server.chat.output.output_plan import OutputPlan
from kvarn.server.chat.output.tools import ToolChoice
from kvarn.server.chat.reasoning import Effort
from kvarn.types import SamplingParams

if TYPE_CHECKING:
    from kvarn.server.models.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat, checked as far as no model is needed."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI's form; empty when the model may not call any
    tool_choice: ToolChoice = "none"
    is_parallel: bool = True  # several calls in one answer
    template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: Effort | None = None  # a hint; with_effort() tells it to the template
    constrained_by: str | None = None  # the field that asks for a constraint

    def output_plan(self, model: ServedModel) -> OutputPlan:
        """How the tools are put into the prompt and how the answer is parsed; raises if the model cannot do it."""
        model.llm.llm.submissions.require_generator("chat")
        return OutputPlan.of(model.output_format, self.tools, self.tool_choice, self.is_parallel)
