"""The table of forms in docs/tools.md is made from the forms: run this file to write it anew."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvarn.server.chat.output.call_forms.detect import FORMAT_RULES
from kvarn.server.chat.output.call_forms.table import FORMS, ToolFormat
from kvarn.server.chat.output.call_forms.writer import written
from tests.rules.tree import ROOT

DOCUMENT = ROOT / "docs" / "tools.md"
HEADER = "| format | looks like | found by |\n|---|---|---|\n"
FAMILIES: dict[ToolFormat, str] = {
    "hermes": "Qwen2.5, Qwen3, Hermes, Granite 4, ERNIE, Bielik, MiMo, Reka",
    "llama3": "Llama 3.1 to 3.3",
    "mistral": "Mistral Nemo",
    "mistral_names": "Mistral Small, Ministral, Devstral",
    "json": "templates without tools: SmolLM, Gemma 2 and 3, Phi-3",
    "harmony": "gpt-oss",
    "qwen_xml": "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
    "seed_xml": "Seed-OSS",
    "arg_key": "GLM-4.5 and 4.6, Ling 3, Laguna",
    "arg_key_inline": "GLM-4.7, Spark",
    "arg_key_sections": "Hunyuan 3",
    "minimax_xml": "MiniMax-M2",
    "dsml": "DeepSeek V4",
    "dsml_functions": "DeepSeek V3.2",
    "param_xml": "MiniCPM5",
    "deepseek": "DeepSeek V3.1",
    "deepseek_fenced": "DeepSeek V3 and R1",
    "kimi": "Kimi K2",
    "kimi_open": "Kimi K3",
    "function_tag": "Functionary 3.1",
    "keyed_list": "Apertus",
    "json_list_upper": "Nemotron Nano 2",
    "json_list": "Apriel, Hunyuan A13B",
    "json_lines": "MiniMax-M1",
    "action_list": "Command R7B, Command A",
    "action_fence": "Command R+",
    "tool_call_list": "Granite 3",
    "tool_call_pair": "Phi-4-mini",
    "functools": "Phi-4-mini, Firefunction",
    "function_call": "GigaChat 3.1",
    "python_list": "LFM2",
    "python_lines": "OLMo 3",
    "python_bare": "Llama 4, Llama 3.2",
    "gemma": "Gemma 4",
}
LAST: dict[ToolFormat, str] = {
    "hermes": "`<tool_call>`, and nothing of the XML forms",
    "llama3": 'the words `Respond in the format {"name": function name, "parameters"`',
    "function_tag": "`<function=NAME>{`",
    "json": "a template that knows no tools",
}


def test_the_table_of_forms_is_the_one_in_use() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")


def test_every_form_has_a_rule_by_which_it_is_found() -> None:
    assert set(FORMS) == set(FAMILIES) == {name for name, _ in FORMAT_RULES} | set(LAST)


def table() -> str:
    return HEADER + "".join(rows())


def rows() -> Iterator[str]:
    for name in FORMS:
        example = written(FORMS[name], [("f", {"x": "y"})])
        yield f"| `{name}`: {FAMILIES[name]} | {code(example)} | {found_by(name)} |\n"


def found_by(name: ToolFormat) -> str:
    rules = [" and ".join(map(code, texts)) for known, texts in FORMAT_RULES if known == name]
    return "; or ".join(rules) if rules else LAST[name]


def code(text: str) -> str:
    shown = text.replace("|", "\\|").replace("\n", "⏎")
    fence = "``" if "`" in text else "`"
    return f"{fence}{' ' if fence == '``' else ''}{shown}{' ' if fence == '``' else ''}{fence}"


if __name__ == "__main__":
    before = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(
        re.sub(
            r"FORMAT_TABLE\n|\| format \| looks like.*?\n(?!\|)",
            lambda _: table() + "\n",
            before,
            count=1,
            flags=re.DOTALL,
        ),
        encoding="utf-8",
    )
