"""The token list of a model file, checked: texts, types, scores and the ids with a special meaning.

Knows GGUF's tokenizer keys and what may be wrong with them; does not know how text becomes tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, cast

from kvarn.errors import FormatError
from kvarn.tokenizer.fim import FIM_KEYS, FimTokens, find_fim_tokens

MAX_TOKENS = 4_000_000  # the largest vocabularies in use have about 260,000

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# Control tokens that end generation, whatever the metadata says about eos; as llama.cpp lists them.
END_OF_GENERATION_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<eos>",
        "</s>",
    }
)
# Tokens for filling in the middle: control tokens as well, though they end nothing.
INFILL_TOKENS = frozenset(
    {
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>"),
        *("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", "<fim-repo>"),
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>"),
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
        *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|repo_name|>", "<|file_sep|>"),
        *("<PRE>", "<SUF>", "<MID>", "▁<PRE>", "▁<SUF>", "▁<MID>"),
    }
)


class TokenType(IntEnum):
    """GGUF's token types."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # plain text, but always one token
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id, their types, and the ids the model treats specially."""

    tokens: Sequence[str]
    token_types: bytes  # one TokenType per token
    ids: Mapping[str, int]
    scores: Sequence[float] | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    fim: FimTokens | None = None

    def of_type(self, *token_types: TokenType) -> list[int]:
        """Ids of all tokens of these types, ascending."""
        wanted = re.compile(b"[" + b"".join(re.escape(bytes([token_type])) for token_type in token_types) + b"]")
        return [match.start() for match in wanted.finditer(self.token_types)]

    def cut(self, num_rows: int) -> Vocabulary:
        """The same vocabulary for a model with fewer ids; only added tokens may be beyond them, and none is chosen."""
        for token_id in range(num_rows, len(self.tokens)):
            if self.token_types[token_id] in (TokenType.NORMAL, TokenType.BYTE, TokenType.UNDEFINED):
                raise FormatError(
                    f"token {token_id:,} of the tokenizer is {self.tokens[token_id][:40]!r}, the model has "
                    f"{num_rows:,} rows for tokens; the tokenizer is of another model",
                )
        return replace(self, eos_ids=tuple(token_id for token_id in self.eos_ids if token_id < num_rows))

    def padded(self, num_tokens: int) -> Vocabulary:
        """The same vocabulary with unused ids at its end; their texts are found by nobody."""
        new = range(len(self.tokens), num_tokens)
        tokens = [*self.tokens, *(unused_text(token_id) for token_id in new)]
        token_types = self.token_types + bytes([TokenType.UNUSED]) * len(new)
        scores = None if self.scores is None else [*self.scores, *(0.0 for _ in new)]
        return replace(self, tokens=tokens, token_types=token_types, scores=scores)


def unused_text(token_id: int) -> str:
    """What stands in the place of a token that is not there."""
    return f"[UNUSED_{token_id}]"


def token_as_bytes(token: str) -> bytes:
    """Return a token's text in UTF-8; bytes the file has that are not UTF-8 come out as they were."""
    try:
        return token.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def read_merges(metadata: Mapping[str, Any]) -> list[str]:
    """Return the merges of GGUF metadata, each "left right"."""
    if "tokenizer.ggml.merges" not in metadata:
        raise FormatError("the file has no tokenizer.ggml.merges; convert the model again")
    merges = _list("tokenizer.ggml.merges", metadata["tokenizer.ggml.merges"])
    if not set(map(type, merges)) <= {str}:
        raise FormatError("tokenizer.ggml.merges holds something that is not a string; get the model file again")
    return merges


def merge_pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Return "left right" lines as pairs."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not set(map(len, pairs)) <= {2}:
        bad = next(merge for merge in merges if merge.count(" ") != 1)
        raise FormatError(f"merge {bad[:80]!r} is not two tokens with one space between them; get the model file again")
    return cast("list[tuple[str, str]]", pairs)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of GGUF metadata, or raise FormatError saying what is wrong with it."""
    tokens = _tokens(metadata)
    ids = _ids_by_text(tokens)
    named = {name: _named_id(metadata, name, len(tokens)) for name in _NAMED_IDS}
    if metadata.get("tokenizer.ggml.model") == "llama":
        for name, default in (("bos", 1), ("eos", 2), ("unknown", 0)):  # as sentencepiece numbers them
            if named[name] is None and default < len(tokens):
                named[name] = default
    token_types = _token_types(metadata, ids, named)
    bos_id = named["bos"] if named["bos"] is not None else named["cls"]
    eos_id = named["eos"] if named["eos"] is not None else named["seperator"]
    return Vocabulary(
        tokens=tokens,
        token_types=token_types,
        ids=ids,
        scores=_scores(metadata, len(tokens)),
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=named["unknown"],
        eos_ids=end_of_generation_ids((eos_id, named["eot"], named["eom"]), ids, token_types),
        fim=find_fim_tokens(ids, named),
    )


def end_of_generation_ids(named: Sequence[int | None], ids: Mapping[str, int], token_types: bytes) -> tuple[int, ...]:
    """Return every id that ends generation: those named, and control tokens known by their text."""
    found = [token_id for token_id in named if token_id is not None]
    for text in sorted(END_OF_GENERATION_TOKENS):
        token_id = ids.get(text)
        if token_id is not None and token_types[token_id] == TokenType.CONTROL:
            found.append(token_id)
    if ({"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys()) and "<|end|>" in ids:
        found = [token_id for token_id in found if token_id != ids["<|end|>"]]  # harmony: ends a message, not the turn
    return tuple(dict.fromkeys(found))


def mark_control(token_types: bytearray, ids: Mapping[str, int]) -> None:
    """Make control tokens of those that a file calls user-defined, as llama.cpp does: text must not become them."""
    for text in END_OF_GENERATION_TOKENS | INFILL_TOKENS:
        token_id = ids.get(text)
        if text == "</s>" and "<eos>" in ids:
            continue  # Gemma's: a tag of HTML among others
        if token_id is not None and token_types[token_id] == TokenType.USER_DEFINED:
            token_types[token_id] = TokenType.CONTROL


# As the keys spell them, "seperator" included.
_NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", *FIM_KEYS)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    value = metadata.get("tokenizer.ggml.tokens")
    if value is None:
        raise FormatError("the file has no tokenizer.ggml.tokens; convert the model again with its tokenizer")
    tokens = _list("tokenizer.ggml.tokens", value)
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise FormatError(
            f"tokenizer.ggml.tokens has {len(tokens):,} entries, 1 to {MAX_TOKENS:,} are possible; "
            "get the model file again"
        )
    if set(map(type, tokens)) != {str}:
        raise FormatError("tokenizer.ggml.tokens holds something that is not a string; get the model file again")
    return tokens


def _ids_by_text(tokens: list[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise FormatError(
            f"token {tokens[first]!r} occurs twice, as id {first} and id {ids[tokens[first]]}; get the model file again"
        )
    return ids


def read_flag(metadata: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    """Return a flag of the tokenizer in GGUF metadata, or the default where the file has none."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is not default and not isinstance(value, bool):
        raise FormatError(f"{key} is {value!r:.40}; expected true or false, get the model file again")
    return value


def _named_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise FormatError(f"{key} is {value!r}, but the vocabulary has {num_tokens:,} tokens; get the model file again")
    return value


def _token_types(metadata: Mapping[str, Any], ids: Mapping[str, int], named: Mapping[str, int | None]) -> bytes:
    value, tokens = metadata.get("tokenizer.ggml.token_type"), list(ids)
    if value is None:
        token_types = bytearray([TokenType.NORMAL]) * len(tokens)
        for token_id in named.values():
            if token_id is not None:
                token_types[token_id] = TokenType.CONTROL
        return bytes(token_types)
    token_types = bytearray(_small_ints("tokenizer.ggml.token_type", value, len(tokens)))
    for match in re.finditer(re.escape(bytes([TokenType.BYTE])), token_types):
        token_id = match.start()
        if BYTE_TOKEN.fullmatch(tokens[token_id]) is None:
            raise FormatError(
                f"byte token {token_id} is {tokens[token_id]!r}, it must be <0x00> to <0xFF>; get the model file again"
            )
    mark_control(token_types, ids)
    return bytes(token_types)


def _small_ints(key: str, value: Any, count: int) -> bytes:
    items = _list(key, value)
    _same_length(key, len(items), count)
    try:
        token_types = bytes(items)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{key} holds a value outside 0 to {max(TokenType)}; get the model file again") from error
    if max(token_types) > max(TokenType):
        raise FormatError(f"{key} holds {max(token_types)}, 0 to {max(TokenType)} are known; get the model file again")
    return token_types


def _scores(metadata: Mapping[str, Any], count: int) -> list[float] | None:
    value = metadata.get("tokenizer.ggml.scores")
    if value is None:
        return None
    scores = _list("tokenizer.ggml.scores", value)
    _same_length("tokenizer.ggml.scores", len(scores), count)
    if not set(map(type, scores)) <= {float, int}:
        raise FormatError("tokenizer.ggml.scores holds something that is not a number; get the model file again")
    if not math.isfinite(sum(scores)):
        raise FormatError("tokenizer.ggml.scores holds NaN or an infinity; get the model file again")
    return scores


def _same_length(key: str, found: int, tokens: int) -> None:
    if found != tokens:
        raise FormatError(
            f"{key} has {found:,} entries, tokenizer.ggml.tokens has {tokens:,}, they must agree; "
            "get the model file again"
        )


def _list(key: str, value: Any) -> list[Any]:
    if hasattr(value, "tolist"):  # a NumPy array
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise FormatError(f"{key} is a {type(value).__name__}, not an array; get the model file again")
    return list(value)
