"""A stream of tokens gives the text that decoding everything at once gives, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.incremental import IncrementalDecoder
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import byte_level, sentence_piece, word_piece

TOKENIZERS = {
    "byte-level": tokenizer_from_gguf(byte_level()),
    "sentencepiece": tokenizer_from_gguf(sentence_piece()),
    "no space prefix": tokenizer_from_gguf(sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})),
    "wordpiece": tokenizer_from_gguf(word_piece()),
}


def whole(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
    """The definition: all bytes together, one leading space taken off where the model put it."""
    kept = [i for i in ids if not (skip_special and tokenizer.is_control(i))]
    head = [i for i in kept if not tokenizer.is_control(i) and tokenizer.token_bytes(i)][:1]
    drop = tokenizer.drops_first_space and bool(head) and tokenizer.token_bytes(head[0]).startswith(b" ")
    data = b""
    for token_id in kept:
        piece = tokenizer.token_bytes(token_id)
        if drop and not tokenizer.is_control(token_id) and piece:
            piece, drop = piece[1:], False
        data += piece
    return data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_give_the_text_of_all_their_bytes(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip_special = data.draw(st.booleans())
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    pieces = [*map(decoder.push, ids), decoder.flush()]
    assert "".join(pieces) == whole(tokenizer, ids, skip_special=skip_special)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


@given(st.text(st.characters(min_codepoint=0x80, exclude_categories=("Cs",)), min_size=1, max_size=10))
def test_valid_text_never_shows_a_replacement_character_on_the_way(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    decoder = IncrementalDecoder(tokenizer)
    pieces = [*map(decoder.push, tokenizer.encode(text)), decoder.flush()]
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def test_at_most_three_bytes_are_held_back() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    decoder = IncrementalDecoder(tokenizer)
    held = [decoder.push(3 + byte) for byte in "🙂".encode()]
    assert held == ["", "", "", "🙂"]


def test_what_can_never_become_a_character_is_replaced_at_once_and_the_rest_at_the_end() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(3 + 0xFF) == "\ufffd"
    assert decoder.push(3 + 0xE2) == ""
    assert decoder.push(3 + ord("a")) == "\ufffda"
    assert decoder.push(3 + 0xE2) == ""
    assert decoder.flush() == "\ufffd"


def test_only_the_first_space_is_dropped_even_after_control_tokens() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    bos, first = tokenizer.encode("a")
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in (bos, first, first)] == ["", "a", " a"]
