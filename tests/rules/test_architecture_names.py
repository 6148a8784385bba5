"""A model is data: engine, cache, decoders, backends and the native core know no architecture by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.tree import modules, native_sources, shown

# At the start of a word or of a CamelCase part, and not the start of a longer lower-case word.
NAMES = re.compile(
    r"(?:(?<![a-zA-Z])|(?=[A-Z]))(?i:llama|qwen|gemma|phi-?3|bert|mistral|mixtral|llada|dream)(?![a-z])",
)
NOT_A_MODEL = re.compile(r"llama\.cpp", re.IGNORECASE)  # the peer engine may be cited in a comment


@pytest.mark.parametrize("folder", ["engine", "kv", "decoding", "backends"])
def test_python_below_the_sdk_names_no_architecture(folder: str) -> None:
    assert not [hit for path in modules(folder) for hit in _hits(path)]


def test_the_native_core_names_no_architecture() -> None:
    assert native_sources()
    assert not [hit for path in native_sources() for hit in _hits(path)]


@pytest.mark.parametrize(
    "text", ['if arch == "qwen2":', "struct LlamaLayer", "is_gemma3 = True", "BERT", "phi3_rope", "loadQwen2"]
)
def test_the_search_finds_a_name(text: str) -> None:
    assert _mentions(text)


@pytest.mark.parametrize("text", ["as llama.cpp does", "liberty", "remember"])
def test_the_search_lets_other_words_pass(text: str) -> None:
    assert not _mentions(text)


def _mentions(line: str) -> bool:
    return NAMES.search(NOT_A_MODEL.sub("", line)) is not None


def _hits(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [f"{shown(path)}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if _mentions(line)]
