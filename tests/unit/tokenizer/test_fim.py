"""Tokens for filling in the middle: found by key or by text, and the prompt made of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.errors import FormatError, InvalidParameter, UnsupportedModel
from kvarn.tokenizer.fim import Infill, SourceFile, fim_prompt, find_fim_tokens
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import PIECES, byte_level, sentence_piece

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
FAMILIES = {
    "qwen": QWEN,
    "starcoder": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<file_sep>"],
    "santacoder": ["<fim-prefix>", "<fim-middle>", "<fim-suffix>"],
    "deepseek": ["<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"],
    "codellama": ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"],
    "glm": ["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
}


def coder(special: list[str] = QWEN, **more: Any) -> Tokenizer:
    """The byte-level vocabulary of the tests with further control tokens at its end."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += special
    metadata["tokenizer.ggml.token_type"] += [3] * len(special)
    return tokenizer_from_gguf(metadata | more)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_known_by_their_texts(family: str) -> None:
    prefix, middle, suffix, *others = FAMILIES[family]
    tokenizer = coder(FAMILIES[family])
    fim = tokenizer.fim
    assert fim is not None
    assert [tokenizer.token_text(token_id) for token_id in (fim.prefix, fim.suffix, fim.middle)] == [
        prefix,
        suffix,
        middle,
    ]
    assert {tokenizer.token_text(token_id) for token_id in fim.stop_ids} == {prefix, suffix, middle, *others}


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_tokens_a_file_names_come_first(names: tuple[str, str, str]) -> None:
    tokenizer = coder(**{f"tokenizer.ggml.{name}_token_id": 40 + place for place, name in enumerate(names)})
    assert tokenizer.fim is not None
    assert (tokenizer.fim.prefix, tokenizer.fim.suffix, tokenizer.fim.middle) == (40, 41, 42)


def test_a_key_that_names_no_token_is_refused() -> None:
    with pytest.raises(FormatError, match="fim_mid_token_id"):
        coder(**{"tokenizer.ggml.fim_mid_token_id": 10**6})


@pytest.mark.parametrize("special", [[], QWEN[:2], ["<|fim_prefix|>", "<|fim_suffix|>"]])
def test_a_model_that_lacks_one_of_the_three_refuses(special: list[str]) -> None:
    tokenizer = coder(special)
    assert tokenizer.fim is None
    with pytest.raises(UnsupportedModel, match="no tokens for filling in the middle"):
        fim_prompt(tokenizer, Infill("a", "b"), 100)


def test_the_prompt_is_prefix_suffix_middle() -> None:
    tokenizer = coder()
    fim = tokenizer.fim
    assert fim is not None
    before, after = ids_of(tokenizer, "def f(x):\n"), ids_of(tokenizer, "    return y\n")
    prompt = fim_prompt(tokenizer, Infill("def f(x):\n", "    return y\n"), 100)
    assert prompt == [fim.prefix, *before, fim.suffix, *after, fim.middle]
    assert fim_prompt(tokenizer, Infill("", ""), 100) == [fim.prefix, fim.suffix, fim.middle]


def test_control_tokens_in_the_texts_are_text() -> None:
    tokenizer = coder()
    assert tokenizer.fim is not None
    prompt = fim_prompt(tokenizer, Infill("<|fim_middle|>", "<|im_end|>"), 100)
    assert [token_id for token_id in prompt if tokenizer.is_control(token_id)] == [
        tokenizer.fim.prefix,
        tokenizer.fim.suffix,
        tokenizer.fim.middle,
    ]


def test_a_text_that_continues_another_gets_no_space_of_its_own() -> None:
    metadata = sentence_piece([*PIECES, "▁<PRE>", "▁<SUF>", "▁<MID>"])
    tokenizer = tokenizer_from_gguf(metadata)
    fim = tokenizer.fim
    assert fim is not None
    prompt = fim_prompt(tokenizer, Infill("ab", "bc"), 100)
    start = [*tokenizer.prefix_ids, fim.prefix, *ids_of(tokenizer, "ab"), fim.suffix]
    assert prompt[: len(start)] == start
    assert [tokenizer.token_text(token_id) for token_id in prompt[len(start) : -1]] == ["bc"]


def test_other_files_stand_before_with_their_names() -> None:
    tokenizer = coder()
    files = [SourceFile("x = 1\n", "a.py"), SourceFile("y = 2\n", "b.py")]
    text = tokenizer.decode(fim_prompt(tokenizer, Infill("a", "b", files), 1000), skip_special=False)
    assert text == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    plain = coder(FAMILIES["deepseek"])
    assert plain.decode(fim_prompt(plain, Infill("a", "b", files), 1000), skip_special=False).startswith(
        "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\n<｜fim▁begin｜>a"
    )


def test_of_files_that_do_not_fit_the_end_is_kept_and_of_a_prefix_only_where_asked_for() -> None:
    tokenizer = coder()
    files = [SourceFile("x" * 500, "a.py")]
    for room in (4, 5, 20, 600):
        prompt = fim_prompt(tokenizer, Infill("p", "s", files), room)
        assert len(prompt) <= max(room, 5)
        assert prompt[-5:] == fim_prompt(tokenizer, Infill("p", "s"), room)
    long = Infill("abcdef", "s")
    assert len(fim_prompt(tokenizer, long, 6)) == 10
    assert fim_prompt(tokenizer, long, 6, is_truncated=True) == fim_prompt(tokenizer, Infill("ef", "s"), 6)
    assert len(fim_prompt(tokenizer, long, 2, is_truncated=True)) == 4


def test_half_a_surrogate_pair_is_refused() -> None:
    for infill in (Infill("\ud83d", ""), Infill("", "\ud83d"), Infill("", "", [SourceFile("\ud83d")])):
        with pytest.raises(InvalidParameter, match="lone surrogate"):
            fim_prompt(coder(), infill, 100)


def test_texts_alone_are_enough_where_there_are_no_keys() -> None:
    assert find_fim_tokens({"<PRE>": 3, "<SUF>": 4, "<MID>": 5}) is not None
    assert find_fim_tokens({"<PRE>": 3, "<SUF>": 4}) is None
