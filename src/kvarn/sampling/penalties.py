"""Changes to logits before temperature, in float32: bias and penalties. Returns new arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


def add_bias(logits: Float32, ids: Int32, values: Float32) -> Float32:
    """Add a value to the logits of some tokens."""
    changed = logits.copy()
    np.add.at(changed, ids, values)
    return changed


def penalise_repetition(logits: Float32, seen_ids: Int32, penalty: float) -> Float32:
    """Divide positive logits of seen tokens by the penalty, multiply the others (CTRL, arXiv:1909.05858)."""
    changed, factor = logits.copy(), np.float32(penalty)
    seen = logits[seen_ids]
    changed[seen_ids] = np.where(seen > 0, seen / factor, seen * factor)
    return changed


def penalise_counts(logits: Float32, seen_ids: Int32, counts: Int32, frequency: float, presence: float) -> Float32:
    """Subtract frequency * count, and presence once where count > 0."""
    changed = logits.copy()
    present = (counts > 0).astype(np.float32)
    changed[seen_ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence) * present
    return changed
