"""Bit masks over a vocabulary: bit i % 32 of word i // 32 says whether token i may be sampled."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]


def num_words(vocab_size: int) -> int:
    """Number of 32-bit words of a mask."""
    return -(-vocab_size // 32)


def mask_without(token_ids: Collection[int], vocab_size: int) -> UInt32:
    """The mask of all tokens but these."""
    allowed = np.zeros(32 * num_words(vocab_size), np.bool_)
    allowed[:vocab_size] = True
    allowed[list(token_ids)] = False
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def is_allowed(mask: UInt32, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def allowed_tokens(mask: UInt32, vocab_size: int) -> npt.NDArray[np.bool_]:
    """One bool per token."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def apply_mask(logits: Float32, mask: UInt32 | None) -> Float32:
    """The logits with -inf where the mask has no bit."""
    if mask is None:
        return logits
    return np.where(allowed_tokens(mask, len(logits)), logits, np.float32("-inf"))
