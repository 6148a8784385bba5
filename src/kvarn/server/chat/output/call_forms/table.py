"""Every format of tool calls, and the texts of a chat template by which it is found. No names of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvarn.server.chat.output.call_forms.form import CallForm, MaybeWord, PairForm, Word

ToolFormat = Literal[
    "hermes",
    "llama3",
    "mistral",
    "mistral_names",
    "json",
    "harmony",
    "qwen_xml",
    "seed_xml",
    "arg_key",
    "arg_key_inline",
    "arg_key_sections",
    "minimax_xml",
    "dsml",
    "dsml_functions",
    "param_xml",
    "deepseek",
    "deepseek_fenced",
    "kimi",
    "kimi_open",
    "function_tag",
    "keyed_list",
    "json_list_upper",
    "json_list",
    "json_lines",
    "action_list",
    "tool_call_list",
    "tool_call_pair",
    "function_call",
    "python_list",
    "python_lines",
    "python_bare",
    "functools",
    "action_fence",
    "gemma",
]

_QWEN_PAIRS = PairForm("<parameter=", ((">", None),), "</parameter>\n", pad="\n")
_ARG_PAIRS = PairForm("<arg_key>", (("</arg_key>\n", None),), "</arg_value>\n", "<arg_value>")
_DSML = "｜DSML｜"
_DSML_PAIRS = PairForm(
    f'<{_DSML}parameter name="', (('" string="true">', True), ('" string="false">', False)), f"</{_DSML}parameter>\n"
)
_OPEN_PAIRS = PairForm(
    '<|open|>argument key="',
    (
        ('" type="string"<|sep|>', True),
        *((f'" type="{name}"<|sep|>', False) for name in ("number", "integer", "object", "array", "boolean", "null")),
    ),
    "<|close|>argument<|sep|>",
)


def _suffixed(suffix: str) -> PairForm:
    return PairForm(
        f"<arg_key{suffix}>", ((f"</arg_key{suffix}>\n", None),), f"</arg_value{suffix}>\n", f"<arg_value{suffix}>"
    )


def _dsml(section: str) -> CallForm:
    return CallForm(
        "pairs",
        f"<{_DSML}{section}>\n",
        (f'<{_DSML}invoke name="',),
        ('">\n',),
        (f"</{_DSML}invoke>\n",),
        end=(f"</{_DSML}{section}>",),
        holds_many=True,
        pairs=_DSML_PAIRS,
    )


def _json(begin: str, *end: str, **others: str | bool) -> CallForm:
    return CallForm("json", begin, end=end, **others)  # type: ignore[arg-type]


FORMS: Mapping[ToolFormat, CallForm] = {
    "hermes": _json("<tool_call>\n", "\n</tool_call>", between="\n"),
    "llama3": _json("<|python_tag|>", is_bare=True, arguments_key="parameters", join="; "),
    "mistral": CallForm(
        "object", "[TOOL_CALLS]", (), (MaybeWord("[CALL_ID]"), "[ARGS]"), takes_json=True, join=", ", holds_many=True
    ),
    "mistral_names": CallForm("object", "[TOOL_CALLS]", (), (MaybeWord("[CALL_ID]"), "[ARGS]"), takes_json=True),
    "json": _json("", is_bare=True, join="\n"),
    "harmony": CallForm(
        "object",
        "<|channel|>commentary to=functions.",
        after_name=(" <|constrain|>json<|message|>",),
    ),
    "qwen_xml": CallForm(
        "pairs",
        "<tool_call>\n",
        ("<function=",),
        (">\n",),
        ("</function>\n",),
        end=("</tool_call>",),
        between="\n",
        pairs=_QWEN_PAIRS,
    ),
    "seed_xml": CallForm(
        "pairs",
        "<seed:tool_call>\n",
        ("<function=",),
        (">\n",),
        ("</function>\n",),
        end=("</seed:tool_call>",),
        between="\n",
        pairs=PairForm("<parameter=", ((">", None),), "</parameter>\n"),
    ),
    "arg_key": CallForm("pairs", "<tool_call>", (), ("\n",), end=("</tool_call>",), between="\n", pairs=_ARG_PAIRS),
    "arg_key_inline": CallForm(
        "pairs",
        "<tool_call>",
        end=("</tool_call>",),
        pairs=PairForm("<arg_key>", (("</arg_key>", None),), "</arg_value>", "<arg_value>"),
    ),
    "arg_key_sections": CallForm(
        "pairs",
        "<tool_calls:opensource>\n",
        ("<tool_call:opensource>",),
        ("<tool_sep:opensource>\n",),
        ("</tool_call:opensource>\n",),
        end=("</tool_calls:opensource>",),
        holds_many=True,
        pairs=_suffixed(":opensource"),
    ),
    "minimax_xml": CallForm(
        "pairs",
        "<minimax:tool_call>\n",
        ('<invoke name="',),
        ('">\n',),
        ("</invoke>\n",),
        end=("</minimax:tool_call>",),
        holds_many=True,
        pairs=PairForm('<parameter name="', (('">', None),), "</parameter>\n"),
    ),
    "dsml": _dsml("tool_calls"),
    "dsml_functions": _dsml("function_calls"),
    "param_xml": CallForm(
        "pairs",
        "",
        ('<function name="',),
        ('">',),
        end=("</function>",),
        between="\n",
        pairs=PairForm('<param name="', (('">', None),), "</param>", quotes=("<![CDATA[", "]]>")),
    ),
    "deepseek": CallForm(
        "object",
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁sep｜>",),
        ("<｜tool▁call▁end｜>",),
        end=("<｜tool▁calls▁end｜>",),
        holds_many=True,
    ),
    "deepseek_fenced": CallForm(
        "object",
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        ("\n```json\n",),
        ("\n```", "<｜tool▁call▁end｜>"),
        "\n",
        ("<｜tool▁calls▁end｜>",),
        holds_many=True,
    ),
    "kimi": CallForm(
        "object",
        "<|tool_calls_section_begin|>",
        ("<|tool_call_begin|>functions.",),
        (":", Word(), "<|tool_call_argument_begin|>"),
        ("<|tool_call_end|>",),
        end=("<|tool_calls_section_end|>",),
        holds_many=True,
    ),
    "kimi_open": CallForm(
        "pairs",
        "<|open|>tools<|sep|>",
        ('<|open|>call tool="',),
        ('" index="', Word("1"), '"<|sep|>'),
        ("<|close|>call<|sep|>",),
        end=("<|close|>tools<|sep|>",),
        holds_many=True,
        pairs=_OPEN_PAIRS,
    ),
    "function_tag": CallForm("object", "", ("<function=",), (">",), end=("</function>",)),
    "keyed_list": CallForm(
        "object", "<|tools_prefix|>[", ('{"',), ('": ',), ("}",), ", ", ("]", "<|tools_suffix|>"), holds_many=True
    ),
    "json_list_upper": _json("<TOOLCALL>", "</TOOLCALL>", holds_many=True, join=", "),
    "json_list": _json("<tool_calls>", "</tool_calls>", holds_many=True, join=", "),
    "json_lines": _json("<tool_calls>\n", "\n</tool_calls>", holds_many=True, join="\n"),
    "action_list": CallForm(
        "json",
        "<|START_ACTION|>",
        ('"tool_call_id": "', Word(), '", '),
        end=("<|END_ACTION|>",),
        holds_many=True,
        join=", ",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    "tool_call_list": _json("<|tool_call|>", holds_many=True, join=", "),
    "tool_call_pair": _json("<|tool_call|>", "<|/tool_call|>", holds_many=True, join=", "),
    "function_call": _json("<|function_call|>"),
    "python_list": CallForm(
        "python", "<|tool_call_start|>[", (), ("(",), (")",), ", ", ("]", "<|tool_call_end|>"), holds_many=True
    ),
    "python_lines": CallForm(
        "python", "<function_calls>\n", (), ("(",), (")",), "\n", ("\n</function_calls>",), holds_many=True
    ),
    "python_bare": CallForm("python", "[", (), ("(",), (")",), ", ", ("]",), holds_many=True),
    "functools": _json("functools", holds_many=True, join=", "),
    "action_fence": _json(
        "Action:\n```json\n", "\n```", holds_many=True, join=", ", name_key="tool_name", arguments_key="parameters"
    ),
    "gemma": CallForm("gemma", "<|tool_call>", ("call:",), ("{",), ("}",), end=("<tool_call|>",)),
}
