"""Build a Tokenizer from the tokenizer keys of GGUF metadata. Knows which model type means which encoder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.tokenizer.encoders.bpe import rank_by_merges
from kvarn.tokenizer.encoders.bytelevel import ByteLevelEncoder
from kvarn.tokenizer.encoders.encoder import TextEncoder
from kvarn.tokenizer.encoders.pretokenize import pre_tokenizer_rule
from kvarn.tokenizer.encoders.sentencepiece import SentencePieceEncoder, rank_by_score
from kvarn.tokenizer.encoders.unigram import UnigramEncoder
from kvarn.tokenizer.encoders.wordpiece import WordPieceEncoder
from kvarn.tokenizer.special_tokens import MatchRules
from kvarn.tokenizer.tokenizer import Tokenizer, TokenizerParts
from kvarn.tokenizer.vocabulary import TokenType, Vocabulary, read_flag, read_merges, read_vocabulary

log = logging.getLogger("kvarn.tokenizer")

KNOWN_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, num_rows: int | None = None) -> Tokenizer:
    """Return the tokenizer of GGUF metadata; num_rows is how many tokens the model's embedding has."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in KNOWN_MODELS:
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {model!r:.80}, which is not known here; known are: {', '.join(KNOWN_MODELS)}",
            fields=("tokenizer.ggml.model",),
        )
    vocabulary = read_vocabulary(metadata)
    _check_size(metadata, vocabulary, num_rows)
    bos_eos = _BosEos(metadata, vocabulary)
    return Tokenizer(
        TokenizerParts(
            vocabulary=vocabulary,
            encoder=_encoder(model, metadata, vocabulary),
            prefix_ids=bos_eos.prefix,
            suffix_ids=bos_eos.suffix,
            between_ids=_between_ids(metadata, vocabulary, bos_eos.suffix),
            chat_template=_text(metadata, "tokenizer.chat_template"),
            rerank_template=_text(metadata, "tokenizer.chat_template.rerank"),
            rules=MatchRules(rstrip=_rstrip_ids(metadata, vocabulary)),
        )
    )


def _encoder(model: str, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> TextEncoder:
    if model == "gpt2":
        name = _text(metadata, "tokenizer.ggml.pre")
        if name is None:
            log.warning("tokenizer.ggml.pre is missing: text is split by llama.cpp's default; convert the model again")
        rule = pre_tokenizer_rule(name)
        return ByteLevelEncoder(vocabulary, read_merges(metadata), rule)
    if model == "bert":
        return WordPieceEncoder(vocabulary, metadata)
    if model == "t5":
        return UnigramEncoder(vocabulary, metadata)
    rank = rank_by_score(vocabulary) if model == "llama" else rank_by_merges(vocabulary, read_merges(metadata))
    space_prefix = bool(read_flag(metadata, "add_space_prefix", model == "llama"))
    return SentencePieceEncoder(vocabulary, rank, space_prefix=space_prefix)


class _BosEos:
    """The ids that encoding puts before and after a text, as the metadata says or the model type implies."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        model = metadata["tokenizer.ggml.model"]
        bos_implied = model in ("llama", "bert", "gemma4") or (
            model == "gpt2" and pre_tokenizer_rule(_text(metadata, "tokenizer.ggml.pre")).adds_bos
        )
        # Early files of Gemma 4 say they have no bos, which they need (llama.cpp pull request 21500).
        adds_bos = model == "gemma4" or read_flag(metadata, "add_bos_token", bos_implied)
        adds_eos = read_flag(metadata, "add_eos_token", model in ("bert", "t5"))
        self.prefix = _required("bos", vocabulary.bos_id) if adds_bos else ()
        self.suffix = _required("eos", vocabulary.eos_id) if adds_eos else ()


def _between_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary, suffix: tuple[int, ...]) -> tuple[int, ...]:
    """Between two texts, RoBERTa's tokenizers have one separator more than after one; ModernBERT's files say so too."""
    pre = metadata.get("tokenizer.ggml.pre")
    separator = metadata.get("tokenizer.ggml.seperator_token_id", vocabulary.eos_id)
    implied = metadata["tokenizer.ggml.model"] == "t5" or pre == "roberta-bpe"
    is_single = metadata["tokenizer.ggml.model"] == "bert" or pre == "modern-bert"
    adds_one = read_flag(metadata, "add_sep_token", implied) and not is_single and suffix and separator is not None
    return (*suffix, separator) if adds_one else suffix


def _required(name: str, token_id: int | None) -> tuple[int, ...]:
    if token_id is None:
        raise FormatError(
            f"tokenizer.ggml.add_{name}_token is set, but there is no tokenizer.ggml.{name}_token_id; "
            "get the model file again"
        )
    return (token_id,)


def _check_size(metadata: Mapping[str, Any], vocabulary: Vocabulary, num_rows: int | None) -> None:
    architecture = metadata.get("general.architecture")
    declared = num_rows if num_rows is not None else metadata.get(f"{architecture}.vocab_size")
    if declared is not None and declared != len(vocabulary.tokens):
        raise FormatError(
            f"tokenizer.ggml.tokens has {len(vocabulary.tokens):,} entries, the model has {declared!r} rows for them; "
            "get the model file again or convert it anew"
        )


def _rstrip_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> frozenset[int]:
    """Phi-3's role tokens strip the line break its template writes after them; GGUF has no key for that."""
    name = str(metadata.get("general.name", "")).lower()
    if metadata["tokenizer.ggml.model"] != "llama" or not ("phi-3" in name or "phi3" in name):
        return frozenset()
    others = {"<unk>", "<s>", "<|endoftext|>"}
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
    return frozenset(token_id for token_id in special if vocabulary.tokens[token_id] not in others)


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{key} is a {type(value).__name__}, not a string; get the model file again")
    return value
