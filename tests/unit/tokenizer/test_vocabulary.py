"""Bad vocabularies are refused with a sentence; good ones give their special ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.errors import FormatError, ModelError, UnsupportedModel
from kvarn.tokenizer.encoders.unigram import UnigramEncoder
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary
from tests.unit.tokenizer.vocabularies import USER, byte_level, sentence_piece, word_piece

Make = Callable[..., dict[str, Any]]
MAKERS: list[Make] = [byte_level, sentence_piece, word_piece]


def refusal(metadata: dict[str, Any]) -> str:
    with pytest.raises(FormatError) as caught:
        tokenizer_from_gguf(metadata)
    return str(caught.value)


def changed(make: Make, key: str, value: Any) -> dict[str, Any]:
    return make(**{f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("declared", [0, 1, 10**6])
def test_a_token_count_other_than_the_declared_vocabulary_is_refused(make: Make, declared: int) -> None:
    metadata = make()
    metadata[f"{metadata['general.architecture']}.vocab_size"] = declared
    assert f"{len(metadata['tokenizer.ggml.tokens'])}" in refusal(metadata)


@pytest.mark.parametrize("make", MAKERS)
def test_a_token_count_other_than_the_rows_of_the_embedding_is_refused(make: Make) -> None:
    metadata = make()
    rows = len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer_from_gguf(metadata, num_rows=rows).vocab_size == rows
    with pytest.raises(FormatError, match="rows"):
        tokenizer_from_gguf(metadata, num_rows=rows + 1)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("key", ["token_type", "scores"])
@pytest.mark.parametrize("difference", [-1, 1])
def test_types_and_scores_of_another_length_are_refused(make: Make, key: str, difference: int) -> None:
    count = len(make()["tokenizer.ggml.tokens"]) + difference
    message = refusal(changed(make, key, [1] * count))
    assert f"{count}" in message
    assert "must agree" in message


@pytest.mark.parametrize("bad", ["<0x-1>", "<0xZZ>", "<0x100>", "<0x1>", "0x41", ""])
def test_a_byte_token_that_names_no_byte_is_refused(bad: str) -> None:
    metadata = sentence_piece()
    metadata["tokenizer.ggml.tokens"][3] = bad
    assert "<0x00> to <0xFF>" in refusal(metadata)


@pytest.mark.parametrize("bad", ["h zzz", "zzz h", "a b", "hello", "h  e", "a b c", "", " "])
def test_a_merge_of_missing_tokens_or_with_another_shape_is_refused(bad: str) -> None:
    assert refusal(changed(byte_level, "merges", ["h e", bad]))


@pytest.mark.parametrize("merges", [None, 5, "h e", [1, 2], [["h", "e"]]])
def test_merges_that_are_no_list_of_strings_are_refused(merges: Any) -> None:
    assert "tokenizer.ggml.merges" in refusal(changed(byte_level, "merges", merges))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "padding", "unknown", "seperator", "cls", "mask"])
@pytest.mark.parametrize("bad", [-1, 10**6, 2**32, 1.5, "1", True])
def test_a_special_id_outside_the_vocabulary_is_refused(make: Make, name: str, bad: Any) -> None:
    assert f"tokenizer.ggml.{name}_token_id" in refusal(changed(make, f"{name}_token_id", bad))


@pytest.mark.parametrize("make", MAKERS)
def test_a_token_that_occurs_twice_is_refused(make: Make) -> None:
    metadata = make()
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][0]
    assert "twice" in refusal(metadata)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("tokens", [None, [], "abc", 7, [1, 2], [b"a"], [None]])
def test_a_token_list_that_is_none_is_refused(make: Make, tokens: Any) -> None:
    assert "tokenizer.ggml.tokens" in refusal(changed(make, "tokens", tokens))


@pytest.mark.parametrize("bad", [7, 255, 256, -1, 2**40, 1.5, "1", None])
def test_an_unknown_token_type_is_refused(bad: Any) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.token_type"][5] = bad
    assert "tokenizer.ggml.token_type" in refusal(metadata)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", None])
def test_a_score_that_is_no_number_is_refused(bad: Any) -> None:
    metadata = sentence_piece()
    metadata["tokenizer.ggml.scores"][5] = bad
    assert "tokenizer.ggml.scores" in refusal(metadata)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_tokens_that_are_not_unicode_keep_their_bytes(make: Make) -> None:
    metadata = make()
    metadata["tokenizer.ggml.tokens"][-1] = "\udcff"
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xff"
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8)


@given(data=st.data())
def test_no_metadata_crashes_the_tokenizer(data: st.DataObject) -> None:
    metadata = data.draw(st.sampled_from(MAKERS))()
    keys = sorted(key for key in metadata if key.startswith("tokenizer."))
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)):
        value = metadata[key]
        if isinstance(value, list) and data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(value) - 1))
            metadata[key] = [*value[:place], data.draw(scalars), *value[place + 1 :]]
        else:
            metadata[key] = data.draw(scalars | st.lists(scalars, max_size=4))
    try:
        tokenizer = tokenizer_from_gguf(metadata)
    except ModelError:
        return
    ids = tokenizer.encode("hello é </s>")
    assert all(0 <= one < tokenizer.vocab_size for one in ids)
    assert isinstance(tokenizer.decode([*ids, *range(tokenizer.vocab_size)]), str)


def test_a_wordpiece_vocabulary_without_an_unknown_token_is_refused() -> None:
    metadata = word_piece()
    del metadata["tokenizer.ggml.unknown_token_id"]
    assert "unknown_token_id" in refusal(metadata)


def test_a_sentencepiece_vocabulary_without_scores_is_refused() -> None:
    metadata = sentence_piece()
    del metadata["tokenizer.ggml.scores"]
    assert "scores" in refusal(metadata)


@pytest.mark.parametrize("model", ["rwkv", "", None, 5])
def test_an_unknown_model_type_is_named_with_the_known_ones(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="known are: gpt2, llama, gemma4, bert, t5"):
        tokenizer_from_gguf(changed(byte_level, "model", model))


def test_arrays_of_numpy_are_as_good_as_lists() -> None:
    metadata = sentence_piece()
    for key, kind in (("token_type", np.int32), ("scores", np.float32)):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"], dtype=kind)
    assert tokenizer_from_gguf(metadata).encode("ab") == tokenizer_from_gguf(sentence_piece()).encode("ab")


def test_generation_ends_at_eos_and_at_control_tokens_known_to_end_it() -> None:
    metadata = byte_level()
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    assert tokenizer_from_gguf(metadata).eos_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])
    metadata["tokenizer.ggml.eot_token_id"] = ids["<tool>"]
    assert ids["<tool>"] in tokenizer_from_gguf(metadata).eos_ids


def test_a_plain_token_that_only_looks_like_an_end_ends_nothing() -> None:
    metadata = byte_level()
    index = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    metadata["tokenizer.ggml.token_type"][index] = 1
    assert index not in tokenizer_from_gguf(metadata).eos_ids


def test_without_token_types_the_named_ids_are_control_tokens() -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.is_control(metadata["tokenizer.ggml.bos_token_id"])
    assert not tokenizer.is_control(0)


def with_user_defined(*texts: str) -> dict[str, Any]:
    """A SentencePiece vocabulary of the usual tokens and user-defined ones."""
    metadata = sentence_piece()
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [USER] * len(texts)
    metadata["tokenizer.ggml.scores"] += [0.0] * len(texts)
    return metadata


@pytest.mark.parametrize("text", ["<|tool_response>", "<turn|>", "<|im_end|>", "<|fim_prefix|>", "<|endoftext|>"])
def test_text_of_users_becomes_no_control_token_that_a_file_calls_user_defined(text: str) -> None:
    tokenizer = tokenizer_from_gguf(with_user_defined(text, "<tool>"))
    token_id, tool_id = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert token_id not in tokenizer.encode(f"a{text}b")
    assert token_id in tokenizer.encode(f"a{text}b", parse_special=True)
    assert tokenizer.is_control(token_id)
    assert (token_id in tokenizer.eos_ids) is ("fim" not in text)
    assert tool_id in tokenizer.encode("a<tool>b")  # any other is text, and always one token


def test_an_end_that_a_file_calls_user_defined_ends_unless_it_is_a_tag_of_html() -> None:
    """Phi-3 has </s> beside its own end; Gemma has it among <h1> and </b>."""
    for beside, is_control in (("<|end|>", True), ("<eos>", False)):
        metadata = with_user_defined(beside)
        metadata["tokenizer.ggml.token_type"][2] = USER  # </s>
        metadata["tokenizer.ggml.eos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
        tokenizer = tokenizer_from_gguf(metadata)
        assert tokenizer.is_control(2) is is_control
        assert (2 in tokenizer.eos_ids) is is_control
        assert (2 in tokenizer.encode("a</s>b")) is not is_control


def test_gemma_4_begins_with_bos_whatever_its_file_says() -> None:
    metadata = sentence_piece() | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["▁ a"]}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": False}
    assert tokenizer_from_gguf(metadata).encode("a")[0] == 1


def test_accents_are_stripped_with_the_case_unless_the_file_says_otherwise() -> None:
    def tokens(**flags: bool) -> list[str]:
        metadata = word_piece(**{f"tokenizer.ggml.normalizer.{name}": value for name, value in flags.items()})
        tokenizer = tokenizer_from_gguf(metadata)
        return [tokenizer.token_text(token_id) for token_id in tokenizer.encode("é", add_special=False)]

    assert tokens() == ["[UNK]"]  # the vocabulary has no e
    assert tokens(strip_accents=False) == ["▁é"]
    assert tokens(lowercase=False) == ["▁é"]
    assert tokens(lowercase=False, strip_accents=True) == ["[UNK]"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (byte_level, "add_bos_token"),
        (sentence_piece, "add_space_prefix"),
        (sentence_piece, "add_eos_token"),
        (word_piece, "normalizer.strip_accents"),
        (word_piece, "normalizer.lowercase"),
    ],
)
def test_a_flag_that_is_none_is_refused(make: Make, name: str) -> None:
    for value in ("false", 1, [True]):
        assert f"tokenizer.ggml.{name} is {value!r}; expected true or false" in refusal(
            make(**{f"tokenizer.ggml.{name}": value})
        )


@pytest.mark.parametrize("named", [{"eos_ids": (0,)}, {"bos_id": 0}])
def test_a_unigram_vocabulary_whose_unknown_token_ends_texts_is_refused(named: dict[str, Any]) -> None:
    types = bytes([TokenType.UNKNOWN, TokenType.CONTROL, TokenType.NORMAL])
    vocabulary = Vocabulary(("<unk>", "</s>", "a"), types, {"<unk>": 0, "</s>": 1, "a": 2}, (0.0, 0.0, -1.0), unk_id=0)
    assert UnigramEncoder(vocabulary, {}).encode("a", at_start=True)
    with pytest.raises(FormatError, match="also begins or ends texts"):
        UnigramEncoder(replace(vocabulary, **named), {})
