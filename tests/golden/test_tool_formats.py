"""Calls that real chat templates write are read back: same names, same arguments and types, however they are cut."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvarn.server.chat.output.deltas import ParsedOutput, joined
from kvarn.server.chat.output.formats import OutputFormat, detect_format
from kvarn.server.chat.output.harmony_stream import HarmonyStream
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream
from kvarn.tokenizer.chat.template_worker import TemplateLimits, TemplateWorker
from tests.assets import llama_cpp_models
from tests.conftest import Size

pytestmark = pytest.mark.model

ASKED = "What is it?"
THOUGHT = "Let me think {about} it."
TOOLS: dict[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "code": {"type": "string", "description": "Digits"},
            "days": {"type": "integer", "description": "How many"},
            "share": {"type": "number", "description": "Part"},
            "is_new": {"type": "boolean", "description": "Whether"},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Words"},
            "options": {"type": "object", "description": "More"},
        },
        "required": ["city"],
    },
    "now-utc": {"type": "object", "properties": {}},
}
GIVEN = [
    {"type": "function", "function": {"name": name, "description": "Tell.", "parameters": parameters}}
    for name, parameters in TOOLS.items()
]
TEXTS = (
    *(
        "Oslo",
        "",
        "é 日本 \U0001f600",
        'say "hi"',
        "it's",
        "two\nlines",
        "\nedges\n",
        " a ",
        "\\ \\n",
        "007",
        "3",
        "true",
    ),
    *("null", "{}", "[1]", '{"a": 1}', "<b>&amp;</b>", "a: b, c=d", "()", "```json", "}", "<tool_call", "None", "1e5"),
)
FORMATS = {
    "hermes": (
        "Bielik-11B-v3.0-Instruct MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use Qwen-QwQ-32B Reka-Edge "
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B "
        "ibm-granite-granite-4.0 ibm-granite-granite-4.1"
    ),
    "llama3": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral_names": (
        "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 "
        "unsloth-mistral-Devstral-Small-2507"
    ),
    "harmony": "openai-gpt-oss-120b",
    "qwen_xml": "Qwen3-Coder Qwen3.5-4B NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 StepFun3.5-Flash",
    "seed_xml": "ByteDance-Seed-OSS",
    "arg_key": ("GLM-4.6 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2"),
    "arg_key_inline": "GLM-4.7-Flash Spark2.5",
    "arg_key_sections": "tencent-Hy3",
    "minimax_xml": "MiniMax-M2",
    "dsml": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "dsml_functions": "deepseek-ai-DeepSeek-V3.2",
    "param_xml": "openbmb-MiniCPM5-1B",
    "deepseek": "deepseek-ai-DeepSeek-V3.1",
    "deepseek_fenced": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B llama-cpp-deepseek-r1",
    "kimi": "moonshotai-Kimi-K2",
    "kimi_open": "Kimi-K3",
    "function_tag": "meetkai-functionary-medium-v3.1",
    "keyed_list": "Apertus-8B-Instruct",
    "json_list_upper": "NVIDIA-Nemotron-Nano-v2",
    "json_list": "unsloth-Apriel-1.5 Apriel-1.6-15b-Thinker-fixed",
    "json_lines": "MiniMax-M1",
    "action_list": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "python_list": "LFM2.5-8B-A1B",
    "gemma": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
}
PAIRS = [(form, name) for form, names in FORMATS.items() for name in names.split()]
# What these templates write does not tell all values apart; no reader could.
ONE_CALL = {"llama3", "harmony"}  # they write the first call of a message alone
WITHOUT_QUOTES = {"python_list"}  # it puts texts between quotes as they are


class Words:
    """A tokenizer without control tokens."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return []

    def is_control(self, token_id: int) -> bool:
        return False

    def token_text(self, token_id: int) -> str:
        return ""


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(TemplateLimits(deadline_s=5.0))
    yield worker
    worker.close()


@pytest.mark.parametrize(("form", "name"), PAIRS, ids=[name for _, name in PAIRS])
def test_the_reader_inverts_the_template(form: str, name: str, worker: TemplateWorker, size: Size) -> None:
    template = source(name)
    format = detect_format(template, Words())
    assert format.tool_format == form
    rng = random.Random(name)
    for trial in range(size(4, 40)):
        calls = [random_call(rng, form) for _ in range(1 if form in ONE_CALL else rng.randint(1, 3))]
        text = answer_text(worker, template, format, calls)
        whole = read([text], format)
        assert [(call.name, json.loads(call.arguments_json)) for call in whole.tool_calls] == calls, text
        assert whole.reasoning in (None, THOUGHT)
        assert read(list(text), format) == whole
        assert all(read(halves(text, at), format) == whole for at in cuts(rng, text, is_all=trial == 0))


@pytest.mark.parametrize(("form", "name"), PAIRS, ids=[name for _, name in PAIRS])
def test_calls_that_are_cut_off_are_told_alike_however_they_come(form: str, name: str, worker: TemplateWorker) -> None:
    rng = random.Random(name)
    format = detect_format(source(name), Words())
    text = answer_text(worker, source(name), format, [random_call(rng, form)])
    for end in sorted(rng.sample(range(len(text)), 12)):
        for is_enforced in (False, True):
            context = AnswerContext("seed", is_enforced=is_enforced)
            whole = read([text[:end]], format, context)
            assert read(list(text[:end]), format, context) == whole
            assert all(is_json(call.arguments_json) for call in whole.tool_calls) or whole.is_cut


def test_every_template_is_read_or_refused_by_name() -> None:
    """Those not in FORMATS: without tools (json), with a form that is written by Kvarn, or not read at all."""
    found = {path.stem: detect_format(path.read_text(encoding="utf-8"), Words()) for path in templates()}
    for _, name in PAIRS:
        found.pop(name)
    refused = {name for name, format in found.items() if format.tool_format is None}
    assert refused == {
        *("GigaChat3-10B-A1.8B", "MiniMax-M3", "meetkai-functionary-medium-v3.2", "muse-glimmer"),
        "upstage-Solar-Open-100B",
    }
    unwritten = {name: format.tool_format for name, format in found.items() if not format.writes_calls}
    assert unwritten == {
        **{"LFM2-8B-A1B": "python_list", "LFM2.5-Instruct": "python_list"},
        **{"ibm-granite-granite-3.3-2B-Instruct": "tool_call_list", "HuggingFaceTB-SmolLM3-3B": "json"},
        **{"google-gemma-2-2b-it": "json", "microsoft-Phi-3.5-mini-instruct": "json", "llama-cpp-rwkv-world": "json"},
    }


def random_call(rng: random.Random, form: str) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.25:
        return "now-utc", {}
    texts = [text for text in TEXTS if form not in WITHOUT_QUOTES or not re.search(r"['\\]", text)]
    values: dict[str, Any] = {
        "city": rng.choice(texts),
        "code": rng.choice(texts),
        "days": rng.choice([0, -3, 12345678901]),
        "share": rng.choice([0.5, -2.25, 1e-7, 3]),
        "is_new": rng.choice([True, False]),
        "tags": rng.sample(texts, rng.randint(0, 3)),
        "options": {"a_1": [1, {"b": rng.choice(texts)}], "c": rng.choice([True, 2.5, rng.choice(texts)])},
    }
    return "get_weather", {key: values[key] for key in values if key == "city" or rng.random() < 0.6}


def answer_text(worker: TemplateWorker, template: str, format: OutputFormat, calls: list[Any]) -> str:
    """What the template writes for an answer that thinks and calls, from the first thing the reader looks for."""
    written = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": written}
    messages = [
        {"role": "user", "content": ASKED},
        {**answer, "reasoning_content": THOUGHT, "thinking": THOUGHT},
        *({"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "DONE"} for call in written),
    ]
    context = {"tools": GIVEN, "messages": messages, "add_generation_prompt": False}
    text = worker.render(template, {"bos_token": "<s>", "eos_token": "</s>", **context})
    text = text[text.rindex(ASKED) + len(ASKED) :]
    opening = "<|channel|>analysis" if format.is_harmony else "{" if format.form.is_bare else format.form.marker
    words = [opening, *([format.reasoning.open] if format.reasoning else [])]
    start = min(text.find(word) for word in words if word in text)
    return text[start : text.index("DONE")]


def read(pieces: list[str], format: OutputFormat, context: AnswerContext | None = None) -> ParsedOutput:
    stream = (HarmonyStream if format.is_harmony else OutputStream)(format, TOOLS, context)
    deltas = [*(delta for piece in pieces for delta in stream.push(piece)), *stream.end()]
    return joined(deltas, is_cut=stream.is_cut)


def halves(text: str, at: int) -> list[str]:
    return [text[:at], text[at:]]


def cuts(rng: random.Random, text: str, *, is_all: bool) -> list[int]:
    return list(range(1, len(text))) if is_all else rng.sample(range(1, len(text)), 20)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def templates() -> list[Any]:
    return sorted((llama_cpp_models() / "templates").glob("*.jinja"))


def source(name: str) -> str:
    return (llama_cpp_models() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
