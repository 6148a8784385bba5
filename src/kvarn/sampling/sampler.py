"""The choice of one token from its logits: the definition every backend's sampler is tested against.

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

from kvarn.sampling.filters import drop_most_probable, keep_min_p, keep_top_k, keep_top_p, keep_typical
from kvarn.sampling.penalties import add_bias, penalise_counts, penalise_repetition
from kvarn.sampling.philox import XTC, uniform
from kvarn.sampling.token_masks import forbid

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

NO_TOKEN = -1  # nothing can be chosen


class ChosenToken(Protocol):
    """All that a choice depends on; kvarn.backends.batch.RowSampling is one."""

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


def choose(logits: Float32, choice: ChosenToken) -> int:
    """Choose a token."""
    if choice.mask is not None and not choice.mask.any():
        return NO_TOKEN
    logits = penalised(logits, choice)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / np.float32(choice.temperature)
    if choice.temperature == 0.0 or not np.isfinite(scaled.max()):
        return int(np.argmax(logits))
    ids, weights = candidates(scaled, choice)
    cumulative = np.cumsum(weights)
    target = uniform(choice.seed, choice.position, choice.choice, draw=choice.draw) * cumulative[-1]
    return int(ids[int(np.searchsorted(cumulative, target, side="left"))])


def penalised(logits: Float32, choice: ChosenToken) -> Float32:
    """Apply the mask, bias and penalties."""
    logits = add_bias(forbid(logits, choice.mask), choice.bias_ids, choice.bias_values)
    logits = penalise_repetition(logits, choice.seen_ids, choice.repetition_penalty)
    return penalise_counts(
        logits, choice.seen_ids, choice.seen_counts, choice.frequency_penalty, choice.presence_penalty
    )


def candidates(logits: Float32, choice: ChosenToken) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Sort and filter: the ids kept and their weights, the most probable first."""
    top_p, min_p, typical_p = (float(np.float32(p)) for p in (choice.top_p, choice.min_p, choice.typical_p))
    ids = np.argsort(-logits, kind="stable")
    if choice.mask is not None:
        ids = ids[logits[ids] > -np.inf]
    ids = ids[keep_top_k(ids, choice.top_k)]
    logs = logits[ids].astype(np.float64)
    logs -= logs[0]
    weights = np.exp(logs)
    kept = keep_typical(weights, logs, typical_p)
    ids, weights = ids[kept], weights[kept]
    for keep, value in ((keep_top_p, top_p), (keep_min_p, min_p)):
        kept = keep(weights, value)
        ids, weights = ids[kept], weights[kept]
    if xtc_strikes(choice):
        kept = drop_most_probable(weights, float(np.float32(choice.xtc_threshold)))
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def xtc_strikes(choice: ChosenToken) -> bool:
    """Whether this choice drops the most probable tokens."""
    probability = float(np.float32(choice.xtc_probability))
    return probability > 0 and uniform(choice.seed, choice.position, choice.choice, XTC, choice.draw) < probability
