"""The tokenizer of a Hugging Face folder as GGUF metadata; byte-level BPE only. Checked by encoding with both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.strict_json import read_optional
from kvarn.formats.weights import WeightSource
from kvarn.tokenizer.encoders.pretokenize import RULES, PreTokenizerRule
from kvarn.tokenizer.from_folder import LIMITS, tokenizer_from_folder
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer

# Cases on which splitting rules differ: contractions, digits, indents, line ends, other scripts, punctuation.
PROBE = (
    "It's 12345 o'clock, isn't IT'S?  Über naïve café\n\n    def f(x):\n\treturn x**2  # 3.14e-10\r\n"
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 مرحبا ½ ² ①  "
    "!!!??? --- ___ a_b C++ <tag/> \N{SLIGHTLY SMILING FACE}\n  \n"
)


def tokenizer_metadata(source: WeightSource, vocab_size: int) -> dict[str, Any]:
    """The tokenizer.* entries of a folder's tokenizer, for a model with vocab_size rows."""
    folder = Path(str(source.metadata.get("hf_folder", source.path)))
    tokenizer = tokenizer_from_folder(folder, num_rows=vocab_size)
    try:
        written = _entries(folder, tokenizer)
        _require_same_tokens(tokenizer, written, vocab_size, str(folder))
        return written
    finally:
        tokenizer.close()


def _entries(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    described = read_optional(folder / "tokenizer.json", LIMITS)
    vocabulary = tokenizer.vocabulary
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _rule_name(described, str(folder)),
        "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": np.frombuffer(vocabulary.token_types, np.uint8).astype(np.int32),
        "tokenizer.ggml.merges": _merges(described),
        "tokenizer.ggml.add_bos_token": bool(tokenizer.prefix_ids),
        "tokenizer.ggml.add_eos_token": False,
    }
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}
    if tokenizer.prefix_ids:
        ids["bos"] = tokenizer.prefix_ids[0]
    found |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items() if token is not None}
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _rule_name(described: Mapping[str, Any], folder: str) -> str:
    """The name of the rule that splits text as tokenizer.json says."""
    wanted = _rule(described)
    for name, rule in RULES.items():
        if wanted is not None and (rule.patterns, rule.gpt2_words, rule.nfc, rule.ignore_merges) == (
            wanted.patterns,
            wanted.gpt2_words,
            wanted.nfc,
            wanted.ignore_merges,
        ):
            return name
    raise UnsupportedModel(
        f"{folder}: its tokenizer is no byte-level BPE whose way of splitting text has a name in GGUF; convert the "
        "model with llama.cpp's convert_hf_to_gguf.py and quantise that file",
        fields=("pre_tokenizer",),
    )


def _rule(described: Mapping[str, Any]) -> PreTokenizerRule | None:
    model, before = described.get("model"), described.get("pre_tokenizer")
    if not isinstance(model, Mapping) or model.get("type") != "BPE" or not isinstance(before, Mapping):
        return None
    steps = before.get("pretokenizers", [before])
    patterns: list[str] = []
    words = has_bytes = False
    for step in steps if isinstance(steps, list) else []:
        kind = step.get("type") if isinstance(step, Mapping) else None
        if kind == "Split" and isinstance(step.get("pattern"), Mapping):
            patterns.append(str(step["pattern"].get("Regex", "")))
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            words, has_bytes = bool(step.get("use_regex", True)), True
        else:
            return None
    normalizer = described.get("normalizer")
    nfc = isinstance(normalizer, Mapping) and normalizer.get("type") == "NFC"
    if not has_bytes or (normalizer is not None and not nfc):
        return None
    return PreTokenizerRule(tuple(patterns), words, bool(model.get("ignore_merges")), nfc)


def _merges(described: Mapping[str, Any]) -> list[str]:
    merges = described["model"].get("merges", [])
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    if any(pair.count(" ") != 1 for pair in pairs):
        raise FormatError("tokenizer.json: a merge is no pair of pieces without spaces")
    return pairs


def _require_same_tokens(tokenizer: Tokenizer, written: Mapping[str, Any], vocab_size: int, folder: str) -> None:
    again = tokenizer_from_gguf(written, num_rows=vocab_size)
    same = again.encode(PROBE) == tokenizer.encode(PROBE) and again.eos_ids == tokenizer.eos_ids
    if not same:
        raise UnsupportedModel(
            f"{folder}: its tokenizer, written as GGUF, would encode text differently; convert the model with "
            "llama.cpp's convert_hf_to_gguf.py and quantise that file"
        )
