"""Read tokenizer.model of sentencepiece: the pieces, their scores and types, and how texts are prepared.

A protobuf message, read field by field with bounds; nothing but what BPE and unigram models need. Gives the
tokenizer keys of GGUF, whose token types are sentencepiece's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvarn.checks import short
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.tokenizer.vocabulary import MAX_TOKENS

FILE: Final = "tokenizer.model"
MAX_BYTES: Final = 64 << 20
MODEL_TYPES: Final = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
GGUF_MODELS: Final = {"unigram": "t5", "bpe": "llama"}
# Numbers of fields, in sentencepiece_model.proto
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SPACE_SUFFIX, _UNK, _BOS, _EOS, _PAD = 3, 24, 40, 41, 42, 43
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Value = int | bytes


def gguf_metadata(data: bytes) -> dict[str, Any]:
    """The tokenizer keys that a GGUF file of this model would have."""
    fields = list(_fields(data))
    pieces = [_piece(value) for number, value in fields if number == _PIECE and isinstance(value, bytes)]
    trainer, normalizer = (_settings(fields, number) for number in (_TRAINER, _NORMALIZER))
    kind = _model_type(trainer)
    _check_settings(kind, trainer, normalizer)
    if not 1 <= len(pieces) <= MAX_TOKENS:
        raise FormatError(f"there are {len(pieces):,} pieces; 1 to {MAX_TOKENS:,} are possible", file=FILE)
    named = {"unknown": _UNK, "bos": _BOS, "eos": _EOS, "padding": _PAD}
    usual = {_UNK: 0, _BOS: 1, _EOS: 2, _PAD: -1}  # the defaults of the message
    ids = {name: _signed(trainer.get(number, usual[number])) for name, number in named.items()}
    known = {name: one for name, one in ids.items() if 0 <= one < len(pieces)}
    # Folders that say nothing about bos and eos mean a bos: what llama's tokenizer puts before a text.
    usual_flags = {"add_bos_token": "bos" in known, "add_eos_token": False} if kind == "unigram" else {}
    return {
        "tokenizer.ggml.model": GGUF_MODELS[kind],
        "tokenizer.ggml.tokens": [piece.text for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_DUMMY_PREFIX, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(_REMOVE_SPACES, 1)),
        "tokenizer.ggml.precompiled_charsmap": normalizer.get(_CHARSMAP, b""),
        **{f"tokenizer.ggml.{name}_token_id": one for name, one in known.items()},
        **{f"tokenizer.ggml.{name}": flag for name, flag in usual_flags.items()},
    }


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    type: int


def _piece(data: bytes) -> _Piece:
    found = dict(_fields(data))
    text, score, type_ = found.get(1, b""), found.get(2, b"\0\0\0\0"), found.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(type_, int):
        raise FormatError("a piece is not a text, a score and a type", file=FILE)
    (number,) = struct.unpack("<f", score)
    if not math.isfinite(number) or not 1 <= type_ <= 6:
        raise FormatError(f"piece {short(text)} has the score {number} and the type {short(type_)}", file=FILE)
    try:
        return _Piece(text.decode("utf-8"), number, type_)
    except UnicodeDecodeError:
        raise FormatError(f"piece {short(text)} is not UTF-8", file=FILE) from None


def _settings(fields: list[tuple[int, Value]], number: int) -> dict[int, Value]:
    """The last one of a message that may occur once."""
    found = [value for field, value in fields if field == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _model_type(trainer: dict[int, Value]) -> str:
    number = trainer.get(_MODEL_TYPE, 1)
    name = MODEL_TYPES.get(number, "?") if isinstance(number, int) else "?"
    if name not in GGUF_MODELS:
        raise UnsupportedModel(
            f"{FILE} is a model of the type {name}; {', '.join(GGUF_MODELS)} are known: convert its tokenizer to "
            "tokenizer.json",
            fields=("model_type",),
        )
    return name


def _check_settings(kind: str, trainer: dict[int, Value], normalizer: dict[int, Value]) -> None:
    """Refuse what would make other tokens of a text than are made here."""
    changed = {
        "escape_whitespaces": not normalizer.get(_ESCAPE_SPACES, 1),
        "treat_whitespace_as_suffix": bool(trainer.get(_SPACE_SUFFIX, 0)),
    }
    if kind == "bpe":
        changed["precompiled_charsmap"] = bool(normalizer.get(_CHARSMAP))
        changed["remove_extra_whitespaces"] = bool(normalizer.get(_REMOVE_SPACES, 1))
    for name, is_changed in changed.items():
        if is_changed:
            raise UnsupportedModel(
                f"{FILE} prepares texts by {name}, which is not known here: convert its tokenizer to tokenizer.json",
                fields=(name,),
            )


def _signed(value: Value) -> int:
    """A 32-bit number, which protobuf writes with 64 bits where it is negative."""
    if not isinstance(value, int):
        raise FormatError("an id is not a number", file=FILE)
    return value - 2**64 if value >= 2**63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: numbers, or bytes of texts, messages and floats."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise FormatError(f"this is not a sentencepiece model: field kind {kind} at byte {at:,}", file=FILE)
        if length > len(data) - at:
            raise FormatError(f"a field of {length:,} bytes ends beyond the file", file=FILE)
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise FormatError("a number ends beyond the file", file=FILE)
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FormatError(f"a number at byte {at:,} has more than 64 bits", file=FILE)
