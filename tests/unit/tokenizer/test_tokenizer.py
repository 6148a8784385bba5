"""What a Tokenizer promises whatever the kind: special tokens, bos and eos, bytes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.errors import InvalidParameter
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import byte_level, sentence_piece, word_piece

BYTE_LEVEL = tokenizer_from_gguf(byte_level())
SENTENCE_PIECE = tokenizer_from_gguf(sentence_piece())
WORD_PIECE = tokenizer_from_gguf(word_piece())
ALL = [BYTE_LEVEL, SENTENCE_PIECE, WORD_PIECE]


def id_of(tokenizer: Tokenizer, text: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == text)


@pytest.mark.parametrize("text", ["<|im_start|>", "a<|im_end|>b", "<|endoftext|>", "<|im_<|im_start|>start|>"])
def test_text_from_a_user_never_becomes_a_control_token(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special=False)
    assert not any(map(BYTE_LEVEL.is_control, ids))
    assert BYTE_LEVEL.decode(ids) == text


@pytest.mark.parametrize(
    ("tokenizer", "text"), [(SENTENCE_PIECE, "</s>"), (SENTENCE_PIECE, "<s>"), (WORD_PIECE, "[SEP]")]
)
def test_nor_does_it_in_other_types_of_vocabulary(tokenizer: Tokenizer, text: str) -> None:
    forbidden = id_of(tokenizer, text)
    assert forbidden not in tokenizer.encode(text, add_special=False)
    assert forbidden in tokenizer.encode(text, add_special=False, parse_special=True)


def test_text_of_our_own_may_hold_control_tokens() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>", parse_special=True)
    assert [BYTE_LEVEL.token_text(i) for i in ids] == ["<|im_start|>", "hello", "<|im_end|>"]


def test_user_defined_tokens_are_always_found() -> None:
    tool = id_of(BYTE_LEVEL, "<tool>")
    assert BYTE_LEVEL.encode("a<tool>") == [*BYTE_LEVEL.encode("a"), tool]
    assert not BYTE_LEVEL.is_control(tool)


@pytest.mark.parametrize(
    ("make", "flags", "before", "after"),
    [
        (byte_level, {}, [], []),
        (byte_level, {"add_bos_token": True}, ["<|endoftext|>"], []),
        (byte_level, {"add_bos_token": True, "add_eos_token": True}, ["<|endoftext|>"], ["<|im_end|>"]),
        (sentence_piece, {}, ["<s>"], []),
        (sentence_piece, {"add_bos_token": False, "add_eos_token": True}, [], ["</s>"]),
        (word_piece, {}, ["[CLS]"], ["[SEP]"]),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_says(
    make: Callable[..., dict[str, Any]], flags: dict[str, bool], before: list[str], after: list[str]
) -> None:
    tokenizer = tokenizer_from_gguf(make(**{f"tokenizer.ggml.{name}": value for name, value in flags.items()}))
    plain = tokenizer.encode("hello", add_special=False)
    ids = tokenizer.encode("hello")
    assert [tokenizer.token_text(i) for i in ids[: len(before)]] == before
    assert ids[len(before) : len(ids) - len(after)] == plain
    assert [tokenizer.token_text(i) for i in ids[len(ids) - len(after) :]] == after


def test_llama_3_style_files_get_bos_without_saying_so() -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre="llama-bpe"))
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id


@given(st.text())
def test_byte_level_and_sentencepiece_give_back_any_text(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(
            "▁", " " if tokenizer is SENTENCE_PIECE else "▁"
        )


def test_word_pieces_are_joined_to_words() -> None:
    assert WORD_PIECE.decode(WORD_PIECE.encode("Hello, UNAFFABLE world")) == "hello , unaffable world"
    assert [WORD_PIECE.token_text(i) for i in WORD_PIECE.encode("unaffable", add_special=False)] == [
        "▁un",
        "aff",
        "able",
    ]


def test_decoding_a_continuation_keeps_its_first_space() -> None:
    ids = SENTENCE_PIECE.encode("ab", add_special=False)
    assert SENTENCE_PIECE.decode(ids) == "ab"
    assert SENTENCE_PIECE.decode(ids, at_start=False) == " ab"


def test_control_tokens_are_shown_only_on_demand() -> None:
    ids = SENTENCE_PIECE.encode("ab")
    assert SENTENCE_PIECE.decode(ids) == "ab"
    assert SENTENCE_PIECE.decode(ids, skip_special=False) == "<s>ab"


def test_every_token_has_bytes() -> None:
    for tokenizer in ALL:
        assert all(isinstance(tokenizer.token_bytes(i), bytes) for i in range(tokenizer.vocab_size))
    assert SENTENCE_PIECE.token_bytes(3 + 0xFF) == b"\xff"
    assert BYTE_LEVEL.token_bytes(id_of(BYTE_LEVEL, "Ġw")) == b" w"


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidParameter, match=str(token_id)):
        tokenizer.decode([token_id])


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize("text", ["\ud800", "a\udfff", 5, None, b"abc"])
def test_what_is_not_valid_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidParameter):
        tokenizer.encode(text)


def test_phi_3_role_tokens_strip_the_line_break_after_them() -> None:
    metadata = sentence_piece(**{"general.name": "Phi-3 mini"})
    metadata["tokenizer.ggml.tokens"] += ["<|user|>"]
    metadata["tokenizer.ggml.token_type"] += [3]
    metadata["tokenizer.ggml.scores"] += [0.0]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("<|user|>\na", parse_special=True) == tokenizer.encode("<|user|>a", parse_special=True)


def test_very_long_words_have_the_tokens_of_short_ones() -> None:
    word = "hello" * 1000
    assert BYTE_LEVEL.encode(word) == BYTE_LEVEL.encode("hello") * 1000
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("hé" * 5000)) == "hé" * 5000


def test_a_merge_cannot_make_a_control_token_of_text() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("hello")] = 3
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("hello", "hello" * 1000):
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_control, ids))
        assert tokenizer.decode(ids) == text


def test_a_long_text_has_the_tokens_of_its_words() -> None:
    words = "hello unaffable, é 日 [mask] qqq "
    once = WORD_PIECE.encode(words, add_special=False)
    assert len(once) > 8
    assert WORD_PIECE.encode(words * 1000, add_special=False) == once * 1000
