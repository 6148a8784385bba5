"""Build the Tokenizer of a folder that has tokenizer.model (sentencepiece, BPE) and no tokenizer.json.

Its pieces, and the tokens that tokenizer_config.json or added_tokens.json add, become the tokenizer keys of GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvarn.checks import short
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.strict_json import read_bytes, read_optional
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.sentencepiece_model import FILE, MAX_BYTES, gguf_metadata
from kvarn.tokenizer.tokenizer import Tokenizer
from kvarn.tokenizer.vocabulary import MAX_TOKENS, TokenType, unused_text

KEY = "tokenizer.ggml."
MAX_ENDS = 3  # ids that end generation: eos, eot, eom


def tokenizer_from_model_file(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], template: str | None, num_rows: int | None
) -> Tokenizer:
    """Return the tokenizer; config is tokenizer_config.json, generation generation_config.json."""
    data = read_bytes(folder / FILE, MAX_BYTES)
    metadata = gguf_metadata(data)
    _add_tokens(metadata, {**_added_file(folder), **_added_in(config)})
    _pad(metadata, num_rows)
    ids = {text: token_id for token_id, text in enumerate(metadata[f"{KEY}tokens"])}
    for name in ("bos", "eos"):
        if (token_id := ids.get(_text_of(config.get(f"{name}_token")))) is not None:
            metadata[f"{KEY}{name}_token_id"] = token_id
        if isinstance(flag := config.get(f"add_{name}_token"), bool):
            metadata[f"{KEY}add_{name}_token"] = flag
    _name_ends(metadata, generation)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return tokenizer_from_gguf(metadata, num_rows=num_rows)


Added = dict[int, tuple[str, bool]]  # text, and whether it is a control token


def _added_in(config: Mapping[str, Any]) -> Added:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping):
        raise FormatError("added_tokens_decoder is not an object", file="tokenizer_config.json")
    found: Added = {}
    for number, entry in entries.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not re.fullmatch("[0-9]{1,7}", number) or int(number) >= MAX_TOKENS:
            raise FormatError(f"added token {short(number)} has no usable id and content", file="tokenizer_config.json")
        found[int(number)] = content, bool(entry.get("special"))
    return found


def _added_file(folder: Path) -> Added:
    found: Added = {}
    for content, token_id in read_optional(folder / "added_tokens.json").items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_TOKENS:
            raise FormatError(f"token {short(content)} has the id {short(token_id)}", file="added_tokens.json")
        found[token_id] = content, False
    return found


def _add_tokens(metadata: dict[str, Any], added: Added) -> None:
    tokens, types = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
    _pad(metadata, max(added, default=-1) + 1)
    for token_id, (content, is_special) in added.items():
        if types[token_id] != TokenType.UNUSED and tokens[token_id] != content:
            raise FormatError(f"token {token_id} is {short(tokens[token_id])} in {FILE}, and added as {short(content)}")
        tokens[token_id] = content
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED


def _pad(metadata: dict[str, Any], count: int | None) -> None:
    """Fill up with unused tokens."""
    tokens = metadata[f"{KEY}tokens"]
    new = range(len(tokens), min(count or 0, MAX_TOKENS))
    tokens += [unused_text(token_id) for token_id in new]
    metadata[f"{KEY}scores"] += [0.0] * len(new)
    metadata[f"{KEY}token_type"] += [int(TokenType.UNUSED)] * len(new)


def _text_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _name_ends(metadata: dict[str, Any], generation: Mapping[str, Any]) -> None:
    """The ids that end generation, beside eos."""
    given = generation.get("eos_token_id", [])
    ends = [one for one in (given if isinstance(given, list) else [given]) if one != metadata.get(f"{KEY}eos_token_id")]
    if len(ends) >= MAX_ENDS:
        raise UnsupportedModel(f"eos_token_id has {len(ends) + 1} ids; {MAX_ENDS} are possible without tokenizer.json")
    metadata |= {f"{KEY}{name}_token_id": one for name, one in zip(("eot", "eom"), ends, strict=False)}
