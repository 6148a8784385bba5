"""Sampling one token from its logits: the definition every backend's sampler is tested against.

    logits (float32)
      -inf where a mask has no bit; no bit at all: NO_TOKEN
      + bias (DRY is part of it), repetition, then frequency and presence penalties     float32
      temperature 0: the largest logit, ties to the lower id           done, also where / temperature overflows
      / temperature                                                    float32
    sort by (descending logit, ascending id); with a mask, those at -inf are no candidates
    weight = exp(double(logit) - double(largest logit))                float64 from here on
      top_k, typical_p, top_p, min_p                                   each over what the one before kept
      XTC, if Philox(key = seed, counter = (position, choice, 1, draw)) < xtc_probability
    u = Philox(key = seed, counter = (position, choice, 0, draw))      [0, 1) with 53 bits
    the first candidate whose cumulative weight >= u * total weight

Cumulative sums are taken left to right over the sorted candidates. Every parameter is rounded to float32 first.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvarn.sampling.filters import drop_top_choices, keep_min_p, keep_top_k, keep_top_p, keep_typical
from kvarn.sampling.penalties import add_bias, penalise_counts, penalise_repetition
from kvarn.sampling.philox import XTC, uniform
from kvarn.sampling.token_masks import apply_mask

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

NO_TOKEN = -1  # nothing can be chosen
BANNED = -1e9  # bias of a token that must not be sampled; finite, so that no inf - inf can arise


class SamplingRow(Protocol):
    """Everything that sampling one token depends on; kvarn.backends.batch.RowSampling is one."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def typical_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def xtc_probability(self) -> float: ...
    @property
    def xtc_threshold(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def draw(self) -> int: ...
    @property
    def bias_ids(self) -> Int32: ...
    @property
    def bias_values(self) -> Float32: ...
    @property
    def seen_ids(self) -> Int32: ...
    @property
    def seen_counts(self) -> Int32: ...
    @property
    def mask(self) -> npt.NDArray[np.uint32] | None: ...


def choose(logits: Float32, row: SamplingRow) -> int:
    """Sample a token; NO_TOKEN where the mask allows none."""
    if row.mask is not None and not row.mask.any():
        return NO_TOKEN
    logits = apply_penalties(logits, row)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / np.float32(row.temperature)
    if row.temperature == 0.0 or not np.isfinite(scaled.max()):
        return int(np.argmax(logits))
    ids, weights = candidates(scaled, row)
    cumulative = np.cumsum(weights)
    target = uniform(row.seed, row.position, row.choice, draw=row.draw) * cumulative[-1]
    return int(ids[int(np.searchsorted(cumulative, target, side="left"))])


def apply_penalties(logits: Float32, row: SamplingRow) -> Float32:
    """Apply the mask, bias and penalties."""
    logits = add_bias(apply_mask(logits, row.mask), row.bias_ids, row.bias_values)
    logits = penalise_repetition(logits, row.seen_ids, row.repetition_penalty)
    return penalise_counts(logits, row.seen_ids, row.seen_counts, row.frequency_penalty, row.presence_penalty)


def candidates(logits: Float32, row: SamplingRow) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Sort and filter: the ids kept and their weights, the most probable first."""
    top_p, min_p, typical_p = (float(np.float32(p)) for p in (row.top_p, row.min_p, row.typical_p))
    ids = np.argsort(-logits, kind="stable")
    if row.mask is not None:
        ids = ids[logits[ids] > -np.inf]
    ids = ids[keep_top_k(ids, row.top_k)]
    logs = logits[ids].astype(np.float64)
    logs -= logs[0]
    weights = np.exp(logs)
    kept = keep_typical(weights, logs, typical_p)
    ids, weights = ids[kept], weights[kept]
    for keep, value in ((keep_top_p, top_p), (keep_min_p, min_p)):
        kept = keep(weights, value)
        ids, weights = ids[kept], weights[kept]
    if applies_xtc(row):
        kept = drop_top_choices(weights, float(np.float32(row.xtc_threshold)))
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def applies_xtc(row: SamplingRow) -> bool:
    """Whether XTC drops the most probable tokens at this position."""
    probability = float(np.float32(row.xtc_probability))
    return probability > 0 and uniform(row.seed, row.position, row.choice, XTC, row.draw) < probability
