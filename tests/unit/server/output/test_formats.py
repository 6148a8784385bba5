"""Which format a chat template shows to its model, on templates as models have them."""

from __future__ import annotations

import pytest

from kvarn.server.chat.output.call_forms.detect import BRACKET_THINK, HARMONY, THINK, Tags
from kvarn.server.chat.output.formats import OutputFormat, detect_format
from tests.assets import llama_cpp_models


class Words:
    """A tokenizer that has some control tokens."""

    def __init__(self, **controls: int) -> None:
        self._controls = controls

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        found = [token_id for marker, token_id in self._controls.items() if parse_special and marker in text]
        return found or list(range(1000, 1000 + len(text)))

    def is_control(self, token_id: int) -> bool:
        return token_id in self._controls.values()

    def token_text(self, token_id: int) -> str:
        return next(text for text, known in self._controls.items() if known == token_id)


PLAIN_CHATML = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"


@pytest.mark.model
@pytest.mark.parametrize(
    ("template", "tool_format", "reasoning"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", THINK),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", None),
        ("unsloth-Apriel-1.5", "json_list", Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3", None),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama3", None),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral_names", None),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral_names", BRACKET_THINK),
        ("Qwen3-Coder", "qwen_xml", None),
        ("GLM-4.6", "arg_key", THINK),
        ("openai-gpt-oss-120b", "harmony", HARMONY),
    ],
)
def test_templates_with_tools(template: str, tool_format: str | None, reasoning: Tags | None) -> None:
    found = detect_format(_template(template), Words())
    assert (found.tool_format, found.reasoning, found.shows_tools) == (tool_format, reasoning, True)


@pytest.mark.model
@pytest.mark.parametrize(
    ("template", "takes_system"), [("google-gemma-2-2b-it", False), ("microsoft-Phi-3.5-mini-instruct", True)]
)
def test_templates_without_tools_get_the_generic_format(template: str, takes_system: bool) -> None:
    found = detect_format(_template(template), Words())
    assert (found.tool_format, found.shows_tools, found.takes_system) == ("json", False, takes_system)


def test_a_model_without_a_template_has_no_format() -> None:
    assert detect_format(None, Words()) == OutputFormat()


def test_words_in_comments_of_a_template_mean_nothing() -> None:
    found = detect_format("{# <think> tools [TOOL_CALLS] #}" + PLAIN_CHATML, Words())
    assert (found.tool_format, found.reasoning, found.shows_tools) == ("json", None, False)


def test_markers_that_are_control_tokens_stay_visible_only_where_they_are_looked_for() -> None:
    words = Words(**{"[TOOL_CALLS]": 9, "[ARGS]": 32, "[THINK]": 34})
    found = detect_format("{{ tools }}[TOOL_CALLS][ARGS][THINK]", words)
    assert found.visible_ids(has_tools=True) == {9, 32, 34}
    assert found.visible_ids(has_tools=False) == {34}
    assert (found.marker_id("[ARGS]"), found.marker_id("[/THINK]")) == (32, None)


def _template(name: str) -> str:
    return (llama_cpp_models() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
