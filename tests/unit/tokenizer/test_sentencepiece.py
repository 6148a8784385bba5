"""Merging characters by score: against a naive loop, with byte fallback and the space before a text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.errors import FormatError
from kvarn.tokenizer.encoders.bpe import merge_pieces
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import sentence_piece


def make(pieces: Any = None, **more: Any) -> Tokenizer:
    return tokenizer_from_gguf(sentence_piece(**more) if pieces is None else sentence_piece(pieces, **more))


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, add_special=False)]


def naive(word: str, ranks: dict[str, float]) -> list[str]:
    """Join the best pair, leftmost among equals, look again."""
    parts = list(word)
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        index = min(found)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


pieces = st.text("abc▁", min_size=2, max_size=5)


@given(st.text("abc▁", max_size=40), st.dictionaries(pieces, st.integers(0, 8).map(float), max_size=30))
def test_merging_gives_what_a_naive_loop_gives(word: str, ranks: dict[str, float]) -> None:
    assert merge_pieces(word, lambda left, right: ranks.get(left + right)) == naive(word, ranks)


@given(
    st.text("ab> ", max_size=40),
    st.lists(st.text("ab>▁", min_size=2, max_size=4), unique=True, max_size=20),
)
def test_splitting_into_words_changes_no_token(text: str, multi: list[str]) -> None:
    tokenizer = make(["▁", "a", "b", ">", *multi], **{"tokenizer.ggml.add_space_prefix": False})
    ranks = {piece: float(place) for place, piece in enumerate(["▁", "a", "b", ">", *multi])}
    assert texts(tokenizer, text) == naive(text.replace(" ", "▁"), ranks)


def test_the_better_score_wins_and_the_leftmost_of_equals() -> None:
    tokenizer = make(**{"tokenizer.ggml.add_space_prefix": False})
    assert texts(tokenizer, "abc") == ["abc"]
    assert texts(tokenizer, "aaaaa") == ["aa", "aaa"]
    assert texts(tokenizer, "bca") == ["bc", "a"]


def test_a_space_goes_before_the_text_only_if_the_model_says_so() -> None:
    assert texts(make(), "a a") == ["▁a", "▁a"]
    assert texts(make(**{"tokenizer.ggml.add_space_prefix": False}), "a a") == ["a", "▁a"]
    assert texts(make(), "") == []


def test_a_character_without_a_token_becomes_its_bytes() -> None:
    tokenizer = make()
    assert texts(tokenizer, "a日")[1:] == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.decode(tokenizer.encode("a日\n🙂")) == "a日\n🙂"


def test_without_byte_tokens_neighbouring_unknown_characters_are_one_unknown_token() -> None:
    metadata = sentence_piece()
    for key in ("tokens", "token_type", "scores"):
        del metadata[f"tokenizer.ggml.{key}"][3:259]
    assert texts(tokenizer_from_gguf(metadata), "a日本a") == ["▁a", "<unk>", "a"]


def test_text_never_becomes_a_control_or_byte_token() -> None:
    tokenizer = make()
    assert texts(tokenizer, "</s>") == ["▁", "</", "s>"]  # although merging these two would give the token </s>
    assert "<0x41>" not in texts(tokenizer, "<0x41>")


def test_many_different_words_do_not_grow_the_word_cache_without_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvarn.tokenizer.encoders.bpe.MAX_CACHED_WORDS", 8)
    tokenizer = make()
    for number in range(100):
        word = "a" * (number % 50 + 1)
        assert tokenizer.decode(tokenizer.encode(word)) == word
    assert len(tokenizer._encoder._words) <= 8  # type: ignore[attr-defined]


def test_merges_in_a_list_decide_for_gemma_4() -> None:
    metadata = sentence_piece(**{"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.bos_token_id": 1})
    metadata["tokenizer.ggml.merges"] = ["b c", "a b", "a bc"]
    assert texts(tokenizer_from_gguf(metadata), "abc ab") == ["abc", "▁", "ab"]


def test_a_merge_of_missing_tokens_is_refused_for_gemma_4() -> None:
    metadata = sentence_piece(**{"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.bos_token_id": 1})
    for bad in ("b z", "z b", "c b", "bc"):
        metadata["tokenizer.ggml.merges"] = ["b c", bad]
        with pytest.raises(FormatError, match="merge"):
            tokenizer_from_gguf(metadata)
