"""What turns a decoder into a masked diffusion model: its mask token, its attention mask, the shift of its logits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvarn.formats.strict_json import read_optional
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, Mask, MaskedDiffusion, ModelSpec

# Names of the mask token, for files that do not give its id.
MASK_TOKENS = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "[MASK]")


def as_masked_diffusion(
    hparams: HParams, spec: ModelSpec, *, shift: bool, block: int | None = None, mask_id: int | None = None
) -> ModelSpec:
    """Turn a decoder into a masked diffusion model. shift and mask_id are used where the file does not give them."""
    if any(part.attention.window is not None for part in spec.blocks):
        raise hparams.unsupported("a diffusion model with a sliding window is unknown", "attention.sliding_window")
    if hparams.is_gguf and hparams.flag("attention.causal", "is_causal", default=False):
        raise hparams.unsupported("a diffusion model with causal attention is unknown", "attention.causal")
    mask: Mask = "bidirectional" if block is None else "block_causal"
    blocks = tuple(_masked(part, mask, block) for part in spec.blocks)
    generation = MaskedDiffusion(_mask_id(hparams, spec.vocab_size, mask_id), _is_shifted(hparams, shift), block)
    return replace(spec, blocks=blocks, generation=generation)


def _masked(block: Block, mask: Mask, mask_block: int | None) -> Block:
    return replace(block, mixer=replace(block.attention, mask=mask, mask_block=mask_block))


def _is_shifted(hparams: HParams, default: bool) -> bool:
    value = hparams.weights.metadata.get("diffusion.shift_logits") if hparams.is_gguf else None
    if value is None:
        return default
    if not isinstance(value, bool | np.bool_):
        raise hparams.format_error(f"diffusion.shift_logits is {value!r:.60}; expected true or false")
    return bool(value)


def _mask_id(hparams: HParams, vocab_size: int, default: int | None) -> int:
    key, value = _stored_mask_id(hparams)
    value = default if value is None else value
    if value is None:
        where = f"no token is called {', '.join(MASK_TOKENS)}" if hparams.is_gguf else "the tokenizer has no mask_token"
        raise hparams.format_error(f"{key} is missing and {where}; which token is the mask?")
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    if not is_number or not 0 <= value < vocab_size:
        raise hparams.format_error(f"{key} is {value!r:.60}; expected a token of the vocabulary of {vocab_size}")
    return int(value)


def tokenizer_mask_id(hparams: HParams) -> int | None:
    """The id of the mask token that a folder's tokenizer names; None when it names none."""
    folder = hparams.weights.metadata.get("hf_folder")
    if folder is None:
        return None
    config, special, added = (
        read_optional(os.path.join(folder, f"{name}.json"))
        for name in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    name = _content(config.get("mask_token") or special.get("mask_token"))
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, Mapping) else {}
    ids = {_content(entry): number for number, entry in listed.items()} | dict(added)
    found = str(ids.get(name)) if name else ""
    return int(found) if found.isdecimal() and len(found) < 10 else None


def refuse_growing_canvas(hparams: HParams) -> None:
    """Refuse a model that lengthens and shortens its canvas: only generation_config.json says that it does."""
    folder = hparams.weights.metadata.get("hf_folder")
    config = {} if folder is None else read_optional(os.path.join(folder, "generation_config.json"))
    own = [key for key in ("expand_token_id", "delete_token_id") if config.get(key) is not None]
    if own:
        raise hparams.unsupported(f"{', '.join(own)}: a canvas that changes its length is unknown", *own)


def _content(token: Any) -> str | None:
    """Tokens are strings, or objects with what they say beside them."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _stored_mask_id(hparams: HParams) -> tuple[str, Any]:
    if not hparams.is_gguf:
        value = hparams.raw(None, "mask_token_id")
        return "mask_token_id", tokenizer_mask_id(hparams) if value is None else value
    key, metadata = "tokenizer.ggml.mask_token_id", hparams.weights.metadata
    value, tokens = metadata.get(key), metadata.get("tokenizer.ggml.tokens")
    if value is None and isinstance(tokens, Sequence):
        value = next((tokens.index(name) for name in MASK_TOKENS if name in tokens), None)
    return key, value
