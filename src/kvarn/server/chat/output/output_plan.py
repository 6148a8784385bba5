"""All that tools and reasoning change about one chat request, from its prompt to its answer.

1. OutputPlan.of(model.output_format, tools, choice, is_parallel) refuses what cannot be done.
2. messages() and template_tools go into the prompt, constraint() or lazy_constraint() and visible_ids into the
   submission.
3. reader() takes each answer apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvarn.errors import ConstraintError
from kvarn.server.api.schema import InvalidField, field_at_fault
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.harmony_stream import AnswerReader, HarmonyStream
from kvarn.server.chat.output.lazy_grammar import Compile, StreamWatch, compile_lazily
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream
from kvarn.server.chat.output.tool_grammar import (
    OptionalCalls,
    after_reasoning,
    formatted_text,
    is_enforced,
    tool_constraint,
)
from kvarn.server.chat.output.tool_prompt import (
    tool_prompt,
    with_system_tools,
    with_text,
    with_tools,
    with_written_calls,
)
from kvarn.server.chat.output.tool_results import in_order_of_calls
from kvarn.server.chat.output.tools import ToolChoice, ToolSpec, check_choice, check_tools
from kvarn.structured.constraints import Constraint, JsonSchema
from kvarn.structured.either_matcher import EitherConstraint
from kvarn.structured.lazy_matcher import LazyConstraint

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

TAIL_TOKENS = 16  # of the prompt: enough for a tag that opens reasoning and the white space after it


class SkippingDecoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Checked tools, in the format of one model. Tools that may not be called are left out altogether."""

    format: OutputFormat
    tools: tuple[ToolSpec, ...]
    choice: ToolChoice
    is_parallel: bool
    given: tuple[Mapping[str, Any], ...]  # the tools in OpenAI's form, for templates

    @staticmethod
    def of(
        format: OutputFormat,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: ToolChoice | None = None,
        is_parallel: bool = True,
    ) -> OutputPlan:
        """Check tools and choice against each other and the model, or raise InvalidField."""
        checked = check_tools(tools)
        choice = choice or "auto"
        check_choice(checked, choice)
        if choice == "none" or not checked:
            return OutputPlan(format, (), "none", is_parallel, ())
        if format.tool_format is None:
            raise InvalidField(
                "the model's chat template writes tool calls in a form that Kvarn does not read; leave tools out, set "
                'tool_choice to "none", or ask another model',
                "tools",
            )
        return OutputPlan(format, checked, choice, is_parallel, tuple(tools))

    @property
    def template_tools(self) -> list[Mapping[str, Any]] | None:
        """Tools for the chat template; None where it has no place for them or there are none."""
        return list(self.given) if self.given and self.format.shows_tools else None

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation as the template can write it."""
        format, ordered = self.format, in_order_of_calls(messages)
        if format.tool_format is None or (format.tool_format == "json" and format.shows_tools):
            return ordered
        if format.tool_format == "json":
            return with_tools(ordered, self.tools, takes_system=format.takes_system)
        if not format.writes_calls:
            ordered = with_written_calls(ordered, format.form)
        if self.given and format.wants_system_tools:
            return with_system_tools(ordered, self.given)
        if self.tools and not format.shows_tools:
            text = tool_prompt(self.tools, format.form)
            return with_text(ordered, text, takes_system=format.takes_system)
        return ordered

    @property
    def is_plain(self) -> bool:
        """Whether answers are content and nothing else, so that they need not be taken apart."""
        return self.format.reasoning is None and not self.tools

    @property
    def visible_ids(self) -> frozenset[int]:
        """Control tokens that must stay in the text of the answer."""
        return self.format.visible_ids(has_tools=bool(self.tools))

    def constraint(
        self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int], wanted: Constraint | None = None
    ) -> Constraint | None:
        """On the whole answer, reasoning included: what makes the model call, or what the caller wanted.

        Where it is free to call and its text has a format, see calls_or_text().
        """
        assert wanted is None or not self.tools
        is_open = self.opens_reasoning(tokenizer, prompt_ids)
        if wanted is not None:
            return after_reasoning(self.format, wanted) if is_open else wanted
        return tool_constraint(
            self.format, self.tools, self.choice, is_parallel=self.is_parallel, starts_in_reasoning=is_open
        )

    def calls_or_text(
        self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int], text: JsonSchema, compile: Compile
    ) -> EitherConstraint:
        """Where the model is free to call and its text has a format: calls, or that text, and nothing else.

        Arguments that cannot be enforced are any, unless their tool is strict.
        """
        is_open = self.opens_reasoning(tokenizer, prompt_ids)
        written = compile(formatted_text(self.format, text, starts_in_reasoning=is_open))
        calls = OptionalCalls(self.tools, self.is_parallel)
        with field_at_fault("tools"):
            try:
                called = compile(calls.grammar(self.format, starts_in_reasoning=is_open))
            except ConstraintError:
                loose = replace(calls, is_loose=True)
                called = compile(loose.grammar(self.format, starts_in_reasoning=is_open))
        return EitherConstraint((called, written))

    def reader(self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int], id_seed: str) -> AnswerReader:
        """What takes one answer apart; give each answer a seed of its own for the ids of its calls."""
        context = self.answer_context(tokenizer, prompt_ids, id_seed)
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return (HarmonyStream if self.format.is_harmony else OutputStream)(self.format, schemas, context)

    def lazy_constraint(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], compile: Compile
    ) -> LazyConstraint | None:
        """What makes the calls follow their schemas that a free model begins; None: it may not call, or must."""
        if not self.tools or is_enforced(self.tools, self.choice):
            return None
        return LazyConstraint(
            compile_lazily(compile, self.format, self.tools),
            partial(self.watch, tokenizer, tuple(prompt_ids)),
            partial(shown_bytes, tokenizer, self.visible_ids),
            max_calls=None if self.is_parallel else 1,
        )

    def watch(self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int]) -> StreamWatch:
        """What looks for calls in one answer, as its reader will."""
        return StreamWatch(self.reader(tokenizer, prompt_ids, ""))

    def answer_context(self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int], id_seed: str) -> AnswerContext:
        """What the reader needs in addition to the text."""
        return AnswerContext(
            id_seed,
            is_enforced(self.tools, self.choice),
            self.opens_reasoning(tokenizer, prompt_ids),
        )

    def opens_reasoning(self, tokenizer: SkippingDecoder, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with the tag that opens the reasoning, as some templates have it.

        Where every part of the answer is a message, it always begins with one that may be reasoning.
        """
        if self.format.reasoning is None or self.format.is_harmony:
            return self.format.is_harmony
        tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special=False, at_start=False)
        return tail.rstrip().endswith(self.format.reasoning.open)


def shown_bytes(tokenizer: Tokenizer, shown: frozenset[int], token_id: int) -> bytes:
    """Bytes of a token as it stands in the text of an answer that shows these control tokens; none: it does not."""
    is_text = token_id in shown or not tokenizer.is_control(token_id)
    return tokenizer.token_bytes(token_id) if is_text else b""
