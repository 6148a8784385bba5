"""Masks, biases and penalties on the device: kvarn.sampling.penalties and token_masks for many rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import Int32, RowSampling
from kvarn.backends.torch.device import on_device
from kvarn.sampling.token_masks import num_words

Int64 = npt.NDArray[np.int64]


def is_changed(row: RowSampling) -> bool:
    """Whether a row's logits are changed before the temperature."""
    return row.mask is not None or len(row.bias_ids) > 0 or has_penalty(row)


def has_penalty(row: RowSampling) -> bool:
    is_penalised = row.repetition_penalty != 1.0 or row.presence_penalty != 0.0 or row.frequency_penalty != 0.0
    return is_penalised and len(row.seen_ids) > 0


def change_logits(logits: Tensor, params: Sequence[RowSampling]) -> Tensor:
    """Apply the mask, bias and penalties of every row to a copy."""
    changed = _apply_masks(logits.clone(), params)
    biased = [i for i, row in enumerate(params) if len(row.bias_ids)]
    if biased:
        _add_bias(changed, params, biased)
    penalised = [i for i, row in enumerate(params) if has_penalty(row)]
    if penalised:
        _penalise(changed, params, penalised)
    return changed


def _apply_masks(logits: Tensor, params: Sequence[RowSampling]) -> Tensor:
    masked = [i for i, row in enumerate(params) if row.mask is not None]
    if not masked:
        return logits
    masks = [mask for row in params if (mask := row.mask) is not None]
    if any(len(mask) != num_words(logits.shape[1]) for mask in masks):
        raise ValueError(f"a mask has not one bit for each of {logits.shape[1]} tokens")
    words = np.stack(masks).astype(np.uint32).view(np.int32)
    at, bits = on_device(masked, logits.device), torch.arange(32, device=logits.device)
    allowed = (on_device(words, logits.device)[:, :, None] >> bits) & 1
    allowed = allowed.view(len(masked), -1)[:, : logits.shape[1]].bool()
    logits[at] = logits[at].masked_fill(~allowed, -torch.inf)
    return logits


def _add_bias(logits: Tensor, params: Sequence[RowSampling], biased: Sequence[int]) -> None:
    rows, ids = _places(logits, biased, [params[i].bias_ids for i in biased])
    values = np.concatenate([params[i].bias_values for i in biased]).astype(np.float32)
    left = np.arange(len(ids))
    while len(left):  # a token named twice is changed twice, in order
        _, first = np.unique(rows[left] * logits.shape[1] + ids[left], return_index=True)
        now = left[np.sort(first)]
        places = tuple(on_device(part[now], logits.device) for part in (rows, ids))
        logits[places] += on_device(values[now], logits.device)
        left = np.setdiff1d(left, now)


def _penalise(logits: Tensor, params: Sequence[RowSampling], penalised: Sequence[int]) -> None:
    some = [params[i] for i in penalised]
    rows, ids = _places(logits, penalised, [row.seen_ids for row in some])
    lengths = [len(row.seen_ids) for row in some]

    def by_token(name: str) -> Tensor:
        values = np.repeat(np.array([getattr(row, name) for row in some], np.float32), lengths)
        return on_device(values, logits.device)

    counts = on_device(np.concatenate([row.seen_counts for row in some]).astype(np.float32), logits.device)
    places = tuple(on_device(part, logits.device) for part in (rows, ids))
    seen, factor = logits[places], by_token("repetition_penalty")
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    present = (counts > 0).float()
    logits[places] = seen - (by_token("frequency_penalty") * counts + by_token("presence_penalty") * present)


def _places(logits: Tensor, numbers: Sequence[int], ids: Sequence[Int32]) -> tuple[Int64, Int64]:
    rows, found = np.repeat(numbers, [len(part) for part in ids]).astype(np.int64), np.concatenate(ids).astype(np.int64)
    if len(found) and not (found.min() >= 0 and found.max() < logits.shape[1]):
        raise ValueError(f"a token id of a bias or penalty is outside the vocabulary of {logits.shape[1]}")
    return rows, found
