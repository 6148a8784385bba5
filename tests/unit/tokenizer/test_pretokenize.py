"""Every known way to cut words loses nothing; unknown ones are refused by name."""

from __future__ import annotations

import pytest

from kvarn.errors import UnsupportedModel
from kvarn.tokenizer.encoders.pretokenize import RULES, build_pre_tokenizer, pre_tokenizer_rule
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from tests.unit.tokenizer.vocabularies import byte_level

TEXT = "Hello, WORLD's  naïve 日本語 12345 ½\r\n\n\tdef f(x):  return x**2 '''café''' 🙂\u200d🙂 ಕನ್ನಡ  "


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_known_rule_gives_back_every_character(name: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre=name))
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special=False)) == TEXT


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 12345", ["I", "'LL", "Ġpay", "Ġ", "123", "45"]),
        ("qwen2", "a 12", ["a", "Ġ", "1", "2"]),
        ("gpt-2", "a 12  b", ["a", "Ġ12", "Ġ", "Ġb"]),
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("falcon", "x==1234", ["x", "==", "123", "4"]),
    ],
)
def test_words_are_split_as_the_model_was_trained(name: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in build_pre_tokenizer(pre_tokenizer_rule(name)).pre_tokenize_str(text)] == words


def test_an_unknown_rule_is_refused_with_its_name_and_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'qwen99'.*known are: .*llama-bpe.*qwen2") as caught:
        tokenizer_from_gguf(byte_level(pre="qwen99"))
    assert caught.value.fields == ("tokenizer.ggml.pre",)


def test_a_missing_rule_is_llama_cpps_default_and_told(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    text = "It's 12345 words!?"
    assert tokenizer_from_gguf(metadata).encode(text) == tokenizer_from_gguf(byte_level(pre="default")).encode(text)
    assert "tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "qwen35"])
def test_text_is_composed_where_the_models_tokenizer_composes_it(name: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre=name))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")
