"""Token ids of texts chosen to be difficult, as the models' own tokenizers gave them."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from kvarn.formats.open import open_weights
from kvarn.tokenizer import load_tokenizer
from kvarn.tokenizer.incremental import IncrementalDecoder
from tests.assets import llama_cpp_models
from tests.golden.llama_cpp_ids import NAMES as WITHOUT_FILES
from tests.golden.llama_cpp_ids import golden, llama_cpp_ids

pytestmark = pytest.mark.model

VOCABULARIES = [
    *("qwen2", "llama-bpe", "llama-spm", "gpt-2", "bert-bge", "phi-3", "falcon", "deepseek-llm", "starcoder"),
    *("command-r", "deepseek-coder", "mpt", "refact", "qwen35", "gemma-4"),
]
SEPARATOR = "\n__ggml_vocab_test__\n"


def vocabulary(name: str) -> Path:
    return llama_cpp_models() / f"ggml-vocab-{name}.gguf"


def cases(name: str) -> list[tuple[str, list[int]]]:
    path = vocabulary(name)
    texts = path.with_name(path.name + ".inp").read_bytes().decode("utf-8").removesuffix(SEPARATOR).split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text(encoding="ascii").splitlines()
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_golden_text_has_its_golden_ids(name: str) -> None:
    tokenizer = load_tokenizer(open_weights(vocabulary(name)))
    golden = [(text, ids) for text, ids in cases(name) if name != "qwen35" or unicodedata.is_normalized("NFC", text)]
    assert len(golden) >= 46  # qwen35's own tokenizer composes letters and marks first; its golden file does not
    wrong = {text: ids for text, ids in golden if tokenizer.encode(text, add_special=False) != ids}
    assert not wrong


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name != "bert-bge"])
def test_golden_ids_give_back_their_text_at_once_and_token_by_token(name: str) -> None:
    tokenizer = load_tokenizer(open_weights(vocabulary(name)))
    for text, ids in cases(name):
        decoder = IncrementalDecoder(tokenizer)
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_vocabularies_without_golden_files_have_the_ids_of_llama_cpp(name: str) -> None:
    """Two of the files do not say how to split text, and get llama.cpp's default."""
    expected, tokenizer = golden(), load_tokenizer(open_weights(vocabulary(name)))
    found = {text: tokenizer.encode(text, add_special=False) for text in expected["texts"]}
    wrong = {
        text: (ids, found[text])
        for text, ids in zip(expected["texts"], expected["ids"][name], strict=True)
        if found[text] != ids
    }
    assert not wrong


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_the_golden_ids_are_what_llama_cpp_makes(name: str) -> None:
    pytest.importorskip("llama_cpp")
    assert llama_cpp_ids(name, golden()["texts"]) == golden()["ids"][name]


def test_every_vocabulary_has_golden_ids() -> None:
    names = {path.stem.removeprefix("ggml-vocab-") for path in llama_cpp_models().glob("ggml-vocab-*.gguf")}
    assert names == {*VOCABULARIES, *WITHOUT_FILES}
