"""What the rows of a canvas have of their own in NumPy: what they read of the last step, and the factors of layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch
from kvarn.backends.reference.layers import Float32, Weights, gated, linear, normalise, unit_rms
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.spec import Block, ModelSpec


def canvas_rows(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which rows are those of a canvas."""
    if batch.canvases is None:
        return np.zeros(len(batch.positions), bool)
    rows: npt.NDArray[np.bool_] = batch.positions >= np.repeat(batch.canvases.starts, np.diff(batch.row_starts))
    return rows


def condition(x: Float32, weights: Weights, spec: ModelSpec, batch: Batch) -> Float32:
    """Add to the embeddings of canvas rows what the last step made of them, and normalise them."""
    diffusion, rows = spec.generation, canvas_rows(batch)
    assert isinstance(diffusion, UniformDiffusion), "only such a model has canvases"
    n = normalise(_fed_back(x, batch)[rows], weights, "self_cond_pre_norm", diffusion.norm)
    gate, up = (linear(n, weights, f"self_cond_{name}") for name in ("gate", "up"))
    added = linear(gated(gate, up, diffusion.activation), weights, "self_cond_down")
    found = x.copy()
    found[rows] = unit_rms(x[rows] + added, np.float32(diffusion.norm.eps))
    return found


def _fed_back(x: Float32, batch: Batch) -> Float32:
    """The feedback of each row, zeros where there is none."""
    assert batch.canvases is not None, "only a batch with canvases has feedback"
    found = np.zeros_like(x)
    for end, feedback in zip(batch.row_starts[1:], batch.canvases.feedback, strict=True):
        if feedback is not None:
            found[end - len(feedback) : end] = feedback
    return found


def output_scales(weights: Weights, stem: str, batch: Batch, block: Block) -> Float32:
    """What each row is multiplied by behind a layer, (rows, 1)."""
    scale = weights[f"{stem}.layer_output_scale.weight"]
    if not block.text_scale:
        return np.broadcast_to(scale, (len(batch.positions), 1))
    return np.where(canvas_rows(batch)[:, None], scale, weights[f"{stem}.enc_layer_output_scale.weight"])
