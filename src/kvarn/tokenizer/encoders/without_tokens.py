"""The model of a tokenizer.json without the texts of some of its tokens, whose ids stay taken.

Control tokens often stand in the model's own table as well. A unigram model chooses them because their score is the
best, a list of merges may lead to them, a word that is one is taken whole: then text of users would become them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any


def without_tokens(model: Any, texts: Collection[str]) -> Any:
    """Return the model with texts renamed to what nobody can write; anything that is no model is left for others."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list):
        return model
    known = vocab if isinstance(vocab, dict) else {entry[0] for entry in vocab if _is_pair(entry)}
    secret = secrets.token_hex(16)
    names = {text: f"[{secret} {number}]" for number, text in enumerate(text for text in texts if text in known)}
    return _renamed(model, vocab, names) if names else model


def _renamed(model: dict[str, Any], vocab: dict[str, Any] | list[Any], names: Mapping[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = {"vocab": _renamed_vocab(vocab, names)}
    if isinstance(model.get("merges"), list):
        changed["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    if isinstance(model.get("unk_token"), str):
        changed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return {**model, **changed}


def _renamed_vocab(vocab: dict[str, Any] | list[Any], names: Mapping[str, str]) -> dict[str, Any] | list[Any]:
    if isinstance(vocab, dict):
        return {names.get(text, text): token_id for text, token_id in vocab.items()}
    return [[names.get(entry[0], entry[0]), *entry[1:]] if _is_pair(entry) else entry for entry in vocab]


def _touches(merge: Any, names: Mapping[str, str]) -> bool:
    """Whether a merge makes one of the tokens, or something of one."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return False
    return "".join(parts) in names or any(part in names for part in parts)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and isinstance(entry[0], str)
