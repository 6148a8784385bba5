"""Sampling and scoring on the host from logits of single rows: what backends without a sampler of their own use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import (
    NO_TOKEN,
    CanvasScores,
    Float32,
    Int32,
    RowSampling,
    Sampled,
    SampleRows,
    Scored,
)
from kvarn.sampling.sampler import apply_penalties, choose

LogitsOf = Callable[[Int32], Float32]  # output rows -> (rows, vocabulary)

MeanOf = Callable[[Float32], Float32]  # probabilities (vocabulary) -> the mean embedding (width)

LOGIT_ROWS = 64  # of logits: rows x vocabulary never exists as one array


def sample_rows(logits_of: LogitsOf, rows: SampleRows, mean_of: MeanOf | None = None) -> Sampled:
    """Choose one token for each row. mean_of: where rows may be those of canvases."""
    chosen = np.zeros(len(rows.rows), np.int32)
    entropy = np.zeros(len(rows.rows), np.float32)
    scores = _Scores(len(rows.rows), rows.num_top)
    for i, params in enumerate(rows.params):
        logits = _guided_logits(logits_of, rows, i)
        chosen[i] = choose(logits, params) if np.all(np.isfinite(logits)) else NO_TOKEN
        if chosen[i] != NO_TOKEN:
            logprobs = log_softmax(logits)
            entropy[i] = -np.sum(np.exp(logprobs) * logprobs)
            scores.put(i, logprobs, int(chosen[i]))
    canvases = () if mean_of is None else canvas_scores(logits_of, rows, mean_of)
    return Sampled(chosen, scores.logprobs, entropy, scores.top_ids, scores.top_logprobs, canvases=canvases)


def canvas_scores(logits_of: LogitsOf, rows: SampleRows, mean_of: MeanOf) -> tuple[CanvasScores, ...]:
    """Of the canvases that the rows form; zeros where the logits are not finite."""
    starts = [] if rows.canvas_starts is None else rows.canvas_starts.tolist()
    found = []
    for first, end in pairwise(starts):
        scored = [_canvas_row(logits_of(rows.rows[i : i + 1])[0], rows.params[i], mean_of) for i in range(first, end)]
        ids, entropy, means = zip(*scored, strict=True)
        found.append(CanvasScores(np.array(ids, np.int32), np.array(entropy, np.float32), np.stack(means)))
    return tuple(found)


def _canvas_row(logits: Float32, row: RowSampling, mean_of: MeanOf) -> tuple[int, float, Float32]:
    if not np.isfinite(logits).all():
        return NO_TOKEN, 0.0, np.zeros_like(mean_of(np.zeros_like(logits)))
    with np.errstate(over="ignore"):
        logits = apply_penalties(logits, row) / np.float32(row.temperature)
    logprobs = log_softmax(logits)
    p = np.exp(logprobs)
    entropy = -np.sum(p * np.where(p > 0, logprobs, 0))
    return int(np.argmax(logits)), float(entropy), mean_of(p.astype(np.float32))


def score_rows(logits_of: LogitsOf, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
    """Log-probabilities of one given token for each of the output rows."""
    scores = _Scores(len(targets), num_top)
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = np.arange(start, min(start + LOGIT_ROWS, len(targets)), dtype=np.int32)
        for i, logprobs in enumerate(log_softmax(logits_of(rows)), start):
            scores.put(i, logprobs, int(targets[i]))
    return Scored(scores.logprobs, scores.top_ids, scores.top_logprobs)


def log_softmax(x: Float32) -> npt.NDArray[np.float64]:
    """Log-probabilities of the last axis, in float64."""
    exact = x.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return exact


def _guided_logits(logits_of: LogitsOf, rows: SampleRows, i: int) -> Float32:
    """Logits of row i, guided away from its partner's where it has one."""
    row = rows.rows[i]
    logits: Float32 = logits_of(np.array([row], np.int32))[0]
    partner = -1 if rows.partners is None else rows.partners[i]
    if partner < 0:
        return logits
    unconditional = logits_of(np.array([partner], np.int32))[0]
    with np.errstate(over="ignore", invalid="ignore"):
        guided: Float32 = unconditional + np.float32(rows.params[i].cfg_scale + 1) * (logits - unconditional)
    return guided


class _Scores:
    """Log-probabilities of given tokens and of the most probable ones, filled row by row."""

    def __init__(self, num_rows: int, num_top: int) -> None:
        self.logprobs = np.zeros(num_rows, np.float32)
        self.top_ids: Int32 = np.zeros((num_rows, num_top), np.int32)
        self.top_logprobs = np.zeros((num_rows, num_top), np.float32)

    def put(self, row: int, logprobs: npt.NDArray[np.float64], token: int) -> None:
        self.logprobs[row] = logprobs[token]
        if num_top := self.top_ids.shape[1]:
            best = np.argsort(-logprobs, kind="stable")[:num_top]
            self.top_ids[row], self.top_logprobs[row] = best, logprobs[best]
