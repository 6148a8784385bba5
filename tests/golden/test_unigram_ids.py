"""Token ids of a unigram vocabulary of 250,000 pieces, as sentencepiece makes them of the same table."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest

from kvarn.formats.open import open_weights
from kvarn.tokenizer import load_tokenizer
from tests.golden.test_token_ids import cases, vocabulary

pytestmark = pytest.mark.model

MORE_TEXTS = (
    *("e\u0301 café", "naïve \u200b x", "ﬁne ①② ½ ＡＢＣ", "한국어 텍스트", "हिन्दी में", "ไทย ภาษา", "a\u00a0b\u3000c"),
    *("🙂👩‍👩‍👧‍👦 ok", "<s></s><mask>", "\u200fעברית \u200e", "Z͑ͫ̓ͪA̴̵̜̰͔L̠ͨͧG̴̻͈͍O̵̹", "  two  spaces  ", "▁already▁written"),
)


def test_the_ids_are_those_of_sentencepiece() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    source = open_weights(vocabulary("nomic-bert-moe"))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=_model_file(source.metadata))
    ours = load_tokenizer(source)
    texts = [text for text, _ in cases("llama-bpe")] + list(MORE_TEXTS)
    wrong = {text: theirs.encode(text) for text in texts if ours.encode(text, add_special=False) != theirs.encode(text)}
    assert not wrong
    assert ours.encode("mill") == [theirs.bos_id(), *theirs.encode("mill"), theirs.eos_id()]
    assert ours.decode(ours.encode("The mill grinds.")) == "The mill grinds."
    assert not set(ours.encode("<s> </s> <mask> [PAD250001]", add_special=False)) & {0, 1, 2, 3, 250001, 250002}


def _model_file(metadata: Mapping[str, Any]) -> bytes:
    """tokenizer.model with the same pieces, by the numbers of sentencepiece_model.proto."""
    keys = ("tokens", "scores", "token_type")
    pieces = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in keys), strict=True)
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    trainer = [_number(3, 1), *(_number(field, metadata[f"tokenizer.ggml.{n}_token_id"]) for field, n in ids.items())]
    charsmap = bytes(metadata["tokenizer.ggml.precompiled_charsmap"])
    normalizer = [_bytes(2, charsmap), _number(3, 1), _number(4, 1), _number(5, 1)]
    return b"".join([*(_piece(*piece) for piece in pieces), _bytes(2, *trainer), _bytes(3, *normalizer)])


def _piece(text: str, score: float, kind: int) -> bytes:
    return _bytes(1, _bytes(1, text.encode()), b"\x15" + struct.pack("<f", score), _number(3, kind))


def _bytes(field: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)
