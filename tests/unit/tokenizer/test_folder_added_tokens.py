"""Special and added tokens of folders: what text of users becomes, where they are found, which of them frame a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvarn.errors import FormatError
from kvarn.tokenizer.from_folder import tokenizer_from_folder
from tests.unit.tokenizer.test_from_folder import byte_level, saved, word_piece

LETTERS = [chr(code) for code in range(33, 127)]
CONTROL = ["<unk>", "<s>", "</s>"]


def unigram() -> Tokenizer:
    vocab = [*((text, 0.0) for text in CONTROL), ("▁", -2.0), *((letter, -5.0) for letter in LETTERS)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def merges() -> Tokenizer:
    """As converters of sentencepiece write them: a merge for every token that two others make."""
    vocab = {text: i for i, text in enumerate([*CONTROL, *LETTERS, "s>", "/s>"])}
    return Tokenizer(models.BPE(vocab, [("s", ">"), ("<", "s>"), ("/", "s>"), ("<", "/s>")], unk_token="<unk>"))


def whole_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate([*CONTROL, *LETTERS])}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({text: i for i, text in enumerate([*CONTROL, "hi"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("make", [unigram, merges, whole_words, word_level])
def test_text_never_becomes_a_control_token_that_the_model_itself_has(make: Any, tmp_path: Path) -> None:
    theirs = make()
    theirs.add_special_tokens(CONTROL)
    ours = tokenizer_from_folder(saved(theirs, tmp_path, eos_token="</s>"))
    text = "hi </s> hi <s>"
    assert not {1, 2} & set(ours.encode(text))
    assert ours.encode(text, parse_special=True) == theirs.encode(text).ids
    assert ours.encode("hi hi") == theirs.encode("hi hi").ids
    assert ours.eos_ids == (2,)


def test_a_word_that_is_unknown_still_becomes_the_unknown_token(tmp_path: Path) -> None:
    theirs = word_piece()
    assert tokenizer_from_folder(saved(theirs, tmp_path)).encode("hello zzz") == theirs.encode("hello zzz").ids


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
@pytest.mark.parametrize(
    "text",
    [
        "aFoob Foo Foo, _Foo Foo1 éFoo (Foo)",
        "a\u00a0Foo\u00a0b",
        "a\u3000Foo\v\fb",
        "a \tFoo\n b",
        "Foo",
        "\x1cFoo\x1c",
    ],
)
def test_added_tokens_are_found_where_the_tokenizers_package_finds_them(flag: str, text: str, tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.add_tokens([AddedToken("Foo", normalized=False, **{flag: True})])
    assert tokenizer_from_folder(saved(theirs, tmp_path)).encode(text) == theirs.encode(text).ids


def test_only_added_tokens_may_be_beyond_the_rows_of_the_model(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = saved(tokenizer, tmp_path, eos_token="<|end|>")
    with pytest.raises(FormatError, match="every text gets token 257, the model has 257 rows"):
        tokenizer_from_folder(folder).fitted(257)
    tokenizer.post_processor = None
    without_bos = tokenizer_from_folder(saved(tokenizer, tmp_path, eos_token="<|end|>"))
    cut = without_bos.fitted(257)
    assert (without_bos.eos_ids, cut.eos_ids) == ((258,), ())
    assert max(cut.encode("any text")) < 257
    with pytest.raises(FormatError, match="token 256 of the tokenizer is 'he', the model has 256 rows"):
        without_bos.fitted(256)
