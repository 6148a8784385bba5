"""Which form of tool calls and which reasoning a chat template shows to its model: by the texts it has in it.

In this order, the first rule of which all texts occur. Templates are told by what they write, never by a model's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.server.chat.output.call_forms.table import ToolFormat


@dataclass(frozen=True, slots=True)
class Tags:
    """The two texts around a model's reasoning."""

    open: str
    close: str


THINK = Tags("<think>", "</think>")
BRACKET_THINK = Tags("[THINK]", "[/THINK]")
HARMONY = Tags("<|channel|>analysis<|message|>", "<|end|>")

FORMAT_RULES: Sequence[tuple[ToolFormat, tuple[str, ...]]] = (
    ("harmony", ("<|channel|>", "<|message|>", "analysis")),
    ("mistral_names", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_fenced", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("dsml", ("｜DSML｜", "tool_calls>")),
    ("dsml_functions", ("｜DSML｜", "function_calls>")),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("kimi_open", ("<|open|>", "open_tag('tools')")),
    ("gemma", ("<|tool_call>", '<|"|>')),
    ("seed_xml", ("<seed:tool_call>",)),
    ("minimax_xml", ("<minimax:tool_call>",)),
    ("arg_key_sections", ("<tool_calls{}>", "<arg_key{}>", "':opensource'")),
    ("action_list", ("<|START_ACTION|>",)),
    ("python_list", ("<|tool_call_start|>",)),
    ("python_list", ("<|tool_list_start|>",)),
    ("python_list", ('"List of tools: ["',)),
    ("python_lines", ("<function_calls>",)),
    ("keyed_list", ("<|tools_prefix|>",)),
    ("json_list_upper", ("<TOOLCALL>",)),
    ("json_list", ("<tool_calls>[",)),
    ("json_lines", ("<tool_calls>\\n{",)),
    ("function_call", ("<|function_call|>",)),
    ("tool_call_pair", ("<|/tool_call|>",)),
    ("tool_call_pair", ("<|tool|>", "<|/tool|>")),
    ("tool_call_list", ("<|tool_call|>",)),
    ("functools", ("functools[{",)),
    ("action_fence", ("Action:", "```json", "tool_name")),
    ("python_bare", ("[func_name1(param",)),
    ("param_xml", ('<function name="', "<param name=")),
    ("arg_key_inline", ("<tool_call>", "</arg_key><arg_value>")),
    ("arg_key", ("<tool_call>", "<arg_key>")),
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter=")),
)
# Inside <tool_call> these are none of the forms above.
_OTHER_CALLS = ("<function=", "<arg_key>", "<invoke", "<parameter=", "]<]minimax[>[")
# Plain Llama 3 announces its format to the model in these words, with or without the python tag.
_LLAMA3_FORMAT = re.compile(r'Respond in the format \{"name": function name, "parameters"')
_FUNCTION_TAG = re.compile(r"<function=[^>\n]{0,80}>\{|<function=' \+ |<function=\{\{")

REASONING_RULES: Sequence[tuple[Tags, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>", "analysis")),
    (BRACKET_THINK, ("[THINK]",)),
    (Tags("<seed:think>", "</seed:think>"), ("seed:think",)),
    (Tags("<mm:think>", "</mm:think>"), ("<mm:think>",)),
    (Tags("<think:opensource>", "</think:opensource>"), ("<think{}>", "':opensource'")),
    (Tags("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_THINKING|>",)),
    (Tags("<|channel>thought", "<channel|>"), ("<|channel>",)),
    (Tags("<|inner_prefix|>", "<|inner_suffix|>"), ("<|inner_prefix|>",)),
    (Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<|open|>", "open_tag('think')")),
    (Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), ("[BEGIN FINAL RESPONSE]",)),
    (THINK, ("<think>",)),
    (THINK, ("</think>",)),
    (Tags("<thought>", "</thought>"), ("<thought>",)),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """The form in which a template writes or asks for calls; None: it has none, or one that is not read here."""
    for name, texts in FORMAT_RULES:
        if all(text in template for text in texts):
            return name
    if "<tool_call>" in template:
        return None if any(form in template for form in _OTHER_CALLS) else "hermes"
    if _LLAMA3_FORMAT.search(template):
        return "llama3"
    return "function_tag" if _FUNCTION_TAG.search(template) else None


def find_reasoning(template: str) -> Tags | None:
    """The tags around the reasoning, if the template knows any."""
    return next((tags for tags, texts in REASONING_RULES if all(text in template for text in texts)), None)
