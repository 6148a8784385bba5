"""Vocabularies as lists of ranks: tiktoken's lines of base64 and Mistral's tekken.json.

Of two neighbours, those are merged first that make the token of the lowest rank; there are no merges. How text is split
into words, and most special tokens, stand in the Python code beside the file, which is not run: the class that
tokenizer_config.json names tells both. A class that is not known is refused.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.checks import short
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.strict_json import JsonLimits, read_bytes, read_object
from kvarn.tokenizer.encoders.bytelevel import byte_of_character
from kvarn.tokenizer.encoders.pretokenize import RULES, PreTokenizerRule, pre_tokenizer_rule
from kvarn.tokenizer.sentencepiece_model import FILE
from kvarn.tokenizer.vocabulary import MAX_TOKENS

TEKKEN = "tekken.json"
MAX_BYTES = 64 << 20  # the largest in use has 4 MB
MAX_TOKEN_BYTES = 4096
TEKKEN_LIMITS = JsonLimits(num_bytes=64 << 20, num_values=2_000_000, num_containers=600_000)  # 19 MB, 150,000 tokens

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,7})")
_CHARACTERS = {byte: character for character, byte in byte_of_character().items()}
_EXTRAS = tuple(f"<|extra_{index}|>" for index in range(205))
_TEKKEN_SPECIAL = (  # of files before version 8, which do not list them
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{index}|>" for index in range(2, 247)),
)


@dataclass(frozen=True, slots=True)
class RankCode:
    """What the code beside a list of ranks says."""

    pre: str  # how text is split into words, by its name in GGUF
    special: tuple[str, ...] = ()  # tokens behind the last rank
    reserved: str = ""  # the name of those that tokenizer_config.json leaves out; {} is the id
    num_reserved: int = 0
    bos: str = ""  # stands before every text
    eos: str = ""


CODES: Mapping[str, RankCode] = {
    "QWenTokenizer": RankCode("qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS), eos="<|endoftext|>"),
    "HYTokenizer": RankCode(
        "qwen2", ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS), eos="<|eos|>"
    ),
    "TikTokenTokenizer": RankCode("kimi-k2", reserved="<|reserved_token_{}|>", num_reserved=256),
    "ChatGLM4Tokenizer": RankCode("chatglm-bpe"),
}
LLAMA = RankCode("llama-bpe", _LLAMA_SPECIAL, bos="<|begin_of_text|>", eos="<|end_of_text|>")
NUM_LLAMA_RANKS = 128_000


@dataclass(frozen=True, slots=True)
class RankVocabulary:
    """A checked list of ranks."""

    texts: Mapping[int, str]  # of all tokens but the special ones, each byte as GPT-2's character for it
    special: tuple[Mapping[str, Any], ...]  # as tokenizer.json would have them
    rule: PreTokenizerRule
    bos: str = ""
    eos: str = ""


def read_ranks(folder: Path, config: Mapping[str, Any]) -> RankVocabulary | None:
    """The vocabulary of a folder with a list of ranks; None: it has none. config is tokenizer_config.json."""
    if os.path.lexists(folder / TEKKEN):
        return _read_tekken(folder / TEKKEN)
    path = _rank_file(folder)
    if path is None:
        return None
    tokens = _read_lines(read_bytes(path, MAX_BYTES), path.name)
    code = _code(config, len(tokens), path.name)
    special = [_special(len(tokens) + index, text) for index, text in enumerate(code.special)]
    known = {*_added_ids(config), *(entry["id"] for entry in special)}
    reserved = (one for one in range(len(tokens), len(tokens) + code.num_reserved) if one not in known)
    special += [_special(token_id, code.reserved.format(token_id)) for token_id in reserved]
    return RankVocabulary(_texts(tokens, 0), tuple(special), pre_tokenizer_rule(code.pre), code.bos, code.eos)


def _rank_file(folder: Path) -> Path | None:
    found = sorted(path for path in folder.glob("*.tiktoken"))
    found += [folder / name for name in ("tiktoken.model", FILE) if os.path.lexists(folder / name)]
    found = [path for path in found if path.name != FILE or _LINE.match(read_bytes(path, MAX_BYTES))]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise FormatError(f"{folder.name} has several lists of ranks ({names}); keep the one of the model")
    return found[0] if found else None


def _code(config: Mapping[str, Any], num_ranks: int, file: str) -> RankCode:
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name in CODES:
        return CODES[name]
    if name is None and num_ranks == NUM_LLAMA_RANKS:
        return LLAMA
    raise UnsupportedModel(
        f"{file} is a list of ranks (tiktoken), and tokenizer_class is {name!r:.40}, which does not tell how text is "
        f"split; known are: {', '.join(CODES)}; else convert the tokenizer to tokenizer.json",
        fields=("tokenizer_class",),
    )


def _read_lines(data: bytes, file: str) -> list[bytes]:
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) > MAX_TOKENS:
        raise FormatError(f"there are {len(lines):,} ranks; at most {MAX_TOKENS:,} are allowed", file=file)
    pairs = []
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise FormatError(f"line {number} is {short(line)}, not a token in base64 and its rank", file=file)
        pairs.append((found[1], int(found[2])))
    return _in_order(pairs, file)


def _in_order(pairs: Iterable[tuple[bytes | str, int]], file: str) -> list[bytes]:
    """The bytes of all tokens by rank: every rank once, every token once, every single byte among them."""
    tokens: dict[int, bytes] = {}
    for text, rank in pairs:
        if rank in tokens:
            raise FormatError(f"rank {rank} occurs twice", file=file)
        tokens[rank] = _decoded(text, rank, file)
    if sorted(tokens) != list(range(len(tokens))):
        gap = next(rank for rank in range(len(tokens)) if rank not in tokens)
        raise FormatError(f"rank {gap} is missing", file=file)
    ordered = [tokens[rank] for rank in range(len(tokens))]
    if len(set(ordered)) != len(ordered):
        raise FormatError("a token occurs twice", file=file)
    missing = {bytes([byte]) for byte in range(256)} - set(ordered)
    if missing:
        raise FormatError(f"{len(missing)} of the 256 single bytes are no tokens", file=file)
    return ordered


def _decoded(text: bytes | str, rank: int, file: str) -> bytes:
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"the token of rank {rank} is {short(text)}, which is not base64", file=file) from error
    if not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise FormatError(f"the token of rank {rank} has {len(token):,} bytes; 1 to {MAX_TOKEN_BYTES:,} are", file=file)
    return token


def _texts(tokens: Sequence[bytes], first_id: int) -> dict[int, str]:
    return {first_id + rank: "".join([_CHARACTERS[byte] for byte in token]) for rank, token in enumerate(tokens)}


def _added_ids(config: Mapping[str, Any]) -> list[int]:
    entries = config.get("added_tokens_decoder")
    return [int(key) for key in entries if re.fullmatch("[0-9]{1,7}", key)] if isinstance(entries, Mapping) else []


def _special(token_id: int, text: str, *, is_control: bool = True) -> dict[str, Any]:
    return {"id": token_id, "content": text, "special": is_control}


def _read_tekken(path: Path) -> RankVocabulary:
    data = read_object(path, TEKKEN_LIMITS)
    config = data.get("config")
    if not isinstance(config, Mapping):
        raise FormatError("config is no object", file=TEKKEN)
    if config.get("pattern") != RULES["tekken"].patterns[0]:
        raise UnsupportedModel(
            f"{TEKKEN} splits text by another pattern than the known one; convert the tokenizer to tokenizer.json",
            fields=("config.pattern",),
        )
    size, num_special = (_count(config, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    vocab = data.get("vocab")
    if not isinstance(vocab, list) or not num_special < size <= num_special + len(vocab):
        raise FormatError(f"default_vocab_size is {size:,}, which the listed tokens do not fill", file=TEKKEN)
    tokens = _in_order(map(_tekken_token, vocab[: size - num_special]), TEKKEN)
    special = _tekken_special(data.get("special_tokens"), num_special)
    rule = RULES["tekken"]
    return RankVocabulary(_texts(tokens, num_special), special, rule, bos="<s>", eos="</s>")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_TOKENS:
        raise FormatError(f"{name} is {short(value)}; expected 1 to {MAX_TOKENS:,}", file=TEKKEN)
    return value


def _tekken_token(entry: Any) -> tuple[str, int]:
    text, rank = (entry.get("token_bytes"), entry.get("rank")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(text, str) or not isinstance(rank, int) or isinstance(rank, bool) or not text.isascii():
        raise FormatError(f"{short(entry)} is no token with a rank", file=TEKKEN)
    return text, rank


def _tekken_special(listed: Any, count: int) -> tuple[Mapping[str, Any], ...]:
    """The first ids: those that are listed, or were understood, and fillers."""
    if listed is None:
        listed = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(_TEKKEN_SPECIAL)]
    if not isinstance(listed, list) or len(listed) > count:
        raise FormatError(f"special_tokens is no list of at most {count:,} tokens", file=TEKKEN)
    special: dict[int, Mapping[str, Any]] = {}
    for entry in listed:
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(rank, int) or not 0 <= rank < count or rank in special or not isinstance(text, str):
            raise FormatError(f"special token {short(entry)} has no usable rank and text", file=TEKKEN)
        special[rank] = _special(rank, text, is_control=entry.get("is_control") is not False)
    fillers = (one for one in range(count) if one not in special)
    return (*special.values(), *(_special(one, f"<SPECIAL_{one}>") for one in fillers))
