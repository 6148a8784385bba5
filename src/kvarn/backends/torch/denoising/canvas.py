"""Canvases of random tokens in torch: what their rows read of the last step, and what a step leaves for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN, Batch, CanvasScores, RowSampling, Sampled, SampleRows
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.elementwise import exp
from kvarn.backends.torch.logit_changes import change_logits, is_changed
from kvarn.backends.torch.weights import CanvasWeights, Linear, NormWeights
from kvarn.models.spec import FeedForward

ROWS = 16  # whose mean embeddings are computed together, always
PIECE = 4096  # ids of the vocabulary that are added up at a time


class CanvasOps(Protocol):
    """What of layers.Ops is needed here."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor: ...

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CanvasRows:
    """The rows of a step that are those of canvases."""

    rows: Tensor  # (n)
    is_canvas: Tensor  # (rows of the step, 1)
    feedback: Tensor  # (n, width) float32, zeros in the first step of a canvas


def make_canvas_rows(batch: Batch, num_rows: int, width: int, device: torch.device) -> CanvasRows | None:
    """num_rows: of the step, padding included."""
    canvases = batch.canvases
    if canvases is None:
        return None
    starts = np.repeat(canvases.starts, np.diff(batch.row_starts))
    rows = np.flatnonzero(batch.positions >= starts).astype(np.int64)
    is_canvas = np.zeros((num_rows, 1), bool)
    is_canvas[rows] = True
    counts = np.bincount(np.searchsorted(batch.row_starts, rows, side="right") - 1, minlength=len(canvases.starts))
    parts = [
        torch.zeros(count, width, device=device) if one is None else one
        for one, count in zip(canvases.feedback, counts.tolist(), strict=True)
    ]
    return CanvasRows(on_device(rows, device), on_device(is_canvas, device), torch.cat(parts))


def condition(x: Tensor, canvas: CanvasRows, weights: CanvasWeights, ops: CanvasOps) -> Tensor:
    """Add to the embeddings of canvas rows what the last step made of them, and normalise them."""
    normed = ops.normalise(canvas.feedback.to(x.dtype), weights.norm)
    added = ops.linear(ops.linear_activate(normed, weights.gate_up, weights.feed_forward), weights.down)
    y = x[canvas.rows].float() + added.float()
    x = x.clone()
    x[canvas.rows] = (y / torch.sqrt(torch.mean(y * y, dim=-1, keepdim=True) + weights.norm.norm.eps)).to(x.dtype)
    return x


def with_canvases(
    sampled: Sampled, logits_of: Callable[[Tensor], Tensor], embed: Callable[[Tensor], Tensor], rows: SampleRows
) -> Sampled:
    """Add the scores of the canvases that the rows form. embed: ids to rows of the embedding as a model reads them."""
    if rows.canvas_starts is None:
        return sampled
    starts, rows, found = rows.canvas_starts.tolist(), rows.with_unused_masked(), []
    for first, end in pairwise(starts):
        parts = [
            _score_some(logits_of, embed, rows.rows[at : min(at + ROWS, end)], rows.params[at : min(at + ROWS, end)])
            for at in range(first, end, ROWS)
        ]
        best, entropy, feedback = (torch.cat(column) for column in zip(*parts, strict=True))
        found.append(CanvasScores(best.cpu().numpy(), entropy.cpu().numpy(), feedback))
    return replace(sampled, canvases=tuple(found))


def _score_some(
    logits_of: Callable[[Tensor], Tensor],
    embed: Callable[[Tensor], Tensor],
    rows: np.ndarray[tuple[int], np.dtype[np.int32]],
    params: Sequence[RowSampling],
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits_of(torch.from_numpy(rows.astype(np.int64)))
    logits = change_logits(logits, params) if any(is_changed(row) for row in params) else logits
    logits = logits / on_device(np.array([row.temperature for row in params], np.float32), logits.device)[:, None]
    largest = logits.amax(dim=-1, keepdim=True)
    best = torch.where(torch.isfinite(largest[:, 0]), torch.argmax(logits, dim=-1), NO_TOKEN)
    logs = logits - largest
    weights = exp(logs)
    total, weighted = _sums(weights), _sums(torch.where(weights > 0, weights * logs, 0.0))
    entropy = torch.log(total) - weighted / total
    padded = torch.nn.functional.pad(weights, (0, 0, 0, ROWS - len(rows)))
    mean: Tensor | None = None
    for first in range(0, weights.shape[1], PIECE):
        ids = torch.arange(first, min(first + PIECE, weights.shape[1]), device=weights.device)
        part = padded[:, first : first + PIECE] @ embed(ids).float()
        mean = part if mean is None else mean + part
    assert mean is not None, "a vocabulary has ids"
    feedback = mean[: len(rows)] / total[:, None].float()
    return best.to(torch.int32), entropy.float(), feedback


def _sums(values: Tensor) -> Tensor:
    """Of each row, in float64 and by one algorithm, however many there are."""
    exact = values.double()
    return torch.cumsum(exact.expand(2, -1) if len(exact) == 1 else exact, dim=-1)[: len(values), -1]
