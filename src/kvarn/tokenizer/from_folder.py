"""Build a Tokenizer from a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

A folder that has tokenizer.model instead is read by from_model_file.py, one with a list of ranks by rank_files.py.
The model inside tokenizer.json is run by the tokenizers package; special tokens are taken out of it first,
because special_tokens.py looks for them (text from users must not become one).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.strict_json import MAX_JSON_BYTES, JsonLimits, read_bytes, read_optional
from kvarn.tokenizer.encoders.bytelevel import ByteLevelEncoder, text_bytes
from kvarn.tokenizer.encoders.encoder import encode_plain, vocabulary_errors
from kvarn.tokenizer.encoders.sentencepiece import SPACE
from kvarn.tokenizer.encoders.without_tokens import without_tokens
from kvarn.tokenizer.fim import find_fim_tokens
from kvarn.tokenizer.folder_sandbox import try_tokenizer
from kvarn.tokenizer.from_model_file import tokenizer_from_model_file
from kvarn.tokenizer.post_processor import bos_eos_ids, has_second_segment, listed_objects
from kvarn.tokenizer.rank_files import RankVocabulary, read_ranks
from kvarn.tokenizer.sentencepiece_model import FILE
from kvarn.tokenizer.special_tokens import MatchRules
from kvarn.tokenizer.tokenizer import Tokenizer, TokenizerParts
from kvarn.tokenizer.vocabulary import (
    BYTE_TOKEN,
    MAX_TOKENS,
    TokenType,
    Vocabulary,
    end_of_generation_ids,
    mark_control,
    token_as_bytes,
    unused_text,
)

# The largest tokenizer.json in use, of 262,000 tokens, has 33 MB, 0.6 million lists and 1.8 million commas.
LIMITS = JsonLimits(num_bytes=128 << 20, num_values=6_000_000, num_containers=2_000_000)


def tokenizer_from_folder(folder: str | Path, *, num_rows: int | None = None) -> Tokenizer:
    """Return the tokenizer of a folder; num_rows is how many tokens the model's embedding has."""
    path = Path(folder)
    tokenizer_json = read_optional(path / "tokenizer.json", LIMITS)
    config, generation = (read_optional(path / name) for name in ("tokenizer_config.json", "generation_config.json"))
    if not tokenizer_json:
        if (ranks := read_ranks(path, config)) is not None:
            return _from_ranks(ranks, config, generation, _chat_template(path, config), num_rows)
        if not os.path.lexists(path / FILE):
            raise UnsupportedModel(f"{path.name} has neither tokenizer.json nor {FILE}, tiktoken, tekken.json; get one")
        return tokenizer_from_model_file(path, config, generation, _chat_template(path, config), num_rows)
    added = [_AddedToken.read(entry) for entry in listed_objects(tokenizer_json, "added_tokens")]
    texts = {**_model_vocabulary(tokenizer_json), **{token.id: token.content for token in added}}
    vocabulary = _with_bos_eos(_vocabulary(texts, added, num_rows), config, generation)
    prefix, suffix, between = bos_eos_ids(tokenizer_json.get("post_processor"), vocabulary)
    control = frozenset(vocabulary.tokens[token_id] for token_id in vocabulary.of_type(TokenType.CONTROL))
    return Tokenizer(
        TokenizerParts(
            vocabulary=vocabulary,
            encoder=FolderEncoder({**tokenizer_json, "model": without_tokens(tokenizer_json.get("model"), control)}),
            prefix_ids=prefix,
            suffix_ids=suffix,
            between_ids=between,
            second_segment=has_second_segment(tokenizer_json.get("post_processor")),
            chat_template=_chat_template(path, config),
            rules=_match_rules(added),
        )
    )


def _from_ranks(
    ranks: RankVocabulary,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    template: str | None,
    num_rows: int | None,
) -> Tokenizer:
    """The tokenizer of a list of ranks and the special tokens around it."""
    listed = {token_id: _AddedToken.read(entry) for token_id, entry in _listed_tokens(config)}
    added = [*(_AddedToken.read(entry) for entry in ranks.special if entry["id"] not in listed), *listed.values()]
    if twice := [token.content for token in added if token.id in ranks.texts]:
        raise FormatError(f"special token {twice[0][:40]!r} has the id of another token", file="tokenizer_config.json")
    texts = {**ranks.texts, **{token.id: token.content for token in added}}
    if len(set(texts.values())) != len(texts):
        raise FormatError("two tokens have the same text", file="tokenizer_config.json")
    named = {name: text for name, text in (("bos_token", ranks.bos), ("eos_token", ranks.eos)) if text}
    vocabulary = _with_bos_eos(_vocabulary(texts, added, num_rows), {**named, **config}, generation)
    adds_bos = bool(ranks.bos) and vocabulary.bos_id is not None
    return Tokenizer(
        TokenizerParts(
            vocabulary=vocabulary,
            encoder=ByteLevelEncoder(vocabulary, None, ranks.rule),
            prefix_ids=(vocabulary.bos_id,) if adds_bos and vocabulary.bos_id is not None else (),
            suffix_ids=(),
            chat_template=template,
            rules=_match_rules(added),
        )
    )


def _listed_tokens(config: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    entries = config.get("added_tokens_decoder") or {}
    is_sound = isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values())
    if not is_sound or not all(re.fullmatch("[0-9]{1,7}", key) for key in entries):
        raise FormatError("added_tokens_decoder is no object of tokens by their ids", file="tokenizer_config.json")
    return [(int(key), {**entry, "id": int(key)}) for key, entry in entries.items()]


class FolderEncoder:
    """A tokenizers model as tokenizer.json describes it, without its special tokens."""

    def __init__(self, tokenizer_json: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer as HfTokenizer

        plain = {**tokenizer_json, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        written = try_tokenizer(plain)
        with vocabulary_errors():
            self._first = HfTokenizer.from_str(written)
            later = _without_first_space(written)
            self._later = self._first if later == written else HfTokenizer.from_str(later)
        names = _component_types(tokenizer_json.get("decoder"))
        self._style = "bytes" if "ByteLevel" in names else "words" if "WordPiece" in names else "pieces"
        self.drops_first_space = self._style == "words" or "Strip" in names or "Metaspace" in names

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of plain text."""
        tokenizer = self._first if at_start else self._later
        return encode_plain(tokenizer, text)

    def piece_bytes(self, token: str) -> bytes:
        """Return the bytes of a normal token."""
        if self._style == "bytes":
            return text_bytes(token)
        if self._style == "words":
            return token_as_bytes(token[2:] if token.startswith("##") else f" {token}")
        return token_as_bytes(token.replace(SPACE, " "))


@dataclass(frozen=True, slots=True)
class _AddedToken:
    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool

    @staticmethod
    def read(entry: Mapping[str, Any]) -> _AddedToken:
        token_id, content = entry.get("id"), entry.get("content")
        if not isinstance(token_id, int) or not 0 <= token_id < MAX_TOKENS or not isinstance(content, str):
            raise FormatError(f"tokenizer.json: added token {str(entry)[:80]} has no usable id and content")
        flags = [bool(entry.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")]
        return _AddedToken(token_id, content, *flags)


def _match_rules(added: Sequence[_AddedToken]) -> MatchRules:
    return MatchRules(
        lstrip=frozenset(token.id for token in added if token.lstrip),
        rstrip=frozenset(token.id for token in added if token.rstrip),
        single_word=frozenset(token.id for token in added if token.single_word),
    )


def _vocabulary(texts: Mapping[int, str], added: Sequence[_AddedToken], num_rows: int | None) -> Vocabulary:
    size = max(texts, default=-1) + 1
    rows = num_rows if num_rows is not None else 2 * len(texts) + 65536  # gaps are allowed, but bounded
    if not 1 <= size <= rows:
        raise FormatError(f"tokenizer.json numbers tokens up to {size - 1:,}, the model has {num_rows} rows for them")
    token_types = bytearray([TokenType.UNUSED]) * max(size, num_rows or 0)
    for token_id, text in texts.items():
        token_types[token_id] = TokenType.BYTE if BYTE_TOKEN.fullmatch(text) else TokenType.NORMAL
    for token in added:
        token_types[token.id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    tokens = [texts.get(token_id, unused_text(token_id)) for token_id in range(len(token_types))]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    mark_control(token_types, ids)
    return Vocabulary(tokens=tokens, token_types=bytes(token_types), ids=ids)


def _with_bos_eos(vocabulary: Vocabulary, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Vocabulary:
    """Add the ids that begin a text and end generation."""
    bos_id, eos_id = (_configured_id(config, name, vocabulary.ids) for name in ("bos_token", "eos_token"))
    more = generation.get("eos_token_id", [])
    for token_id in more if isinstance(more, list) else [more]:
        if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
            raise FormatError(f"eos_token_id is {token_id!r:.20}, which is no token", file="generation_config.json")
    named = (eos_id, *(more if isinstance(more, list) else [more]))
    return replace(
        vocabulary,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=end_of_generation_ids(named, vocabulary.ids, vocabulary.token_types),
        fim=find_fim_tokens(vocabulary.ids),
    )


def _model_vocabulary(tokenizer_json: Mapping[str, Any]) -> dict[int, str]:
    model = tokenizer_json.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # unigram: [[text, score], ...]
        pairs = [(entry[0], index) for index, entry in enumerate(vocab) if isinstance(entry, list) and entry]
    else:
        pairs = list(vocab.items()) if isinstance(vocab, dict) else []
    for text, token_id in pairs:
        if not isinstance(text, str) or not isinstance(token_id, int) or not 0 <= token_id < MAX_TOKENS:
            raise FormatError(
                f"tokenizer.json: vocabulary entry {text!r:.40}: {token_id!r:.20} is not a token and an id"
            )
    return {token_id: text for text, token_id in pairs}


def _configured_id(config: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return ids.get(text) if isinstance(text, str) else None


def _without_first_space(written: str) -> str:
    """Return tokenizer.json for text that is not the first."""
    return written.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')


def _component_types(component: Any) -> set[str]:
    if not isinstance(component, dict):
        return set()
    return {str(component.get("type"))}.union(*map(_component_types, component.get("decoders", ())))


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    separate, value = path / "chat_template.jinja", config.get("chat_template")
    if os.path.lexists(separate):
        return read_bytes(separate, MAX_JSON_BYTES).decode("utf-8", "replace")
    if isinstance(value, list):  # several, by name
        named = {str(one.get("name")): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
