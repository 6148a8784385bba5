"""From a shape to the cut that has it, refitted, and what that cut does to the predictions, measured.

What is left makes good what went. For inputs x with moments M = E[x x^T] and kept columns K, the W' of least
E|W x - W' x_K|^2 is W M[:, K] M[K, K]^-1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kvarn.errors import ConfigError
from kvarn.formats.weights import WeightSource
from kvarn.hub import OnProgress
from kvarn.models.spec import ModelSpec
from kvarn.pruning.cut import Cut, Indices, LayerCut
from kvarn.pruning.families import kept_layers, layer_kinds
from kvarn.pruning.importance.criteria import Float32, best
from kvarn.pruning.importance.scores import PartScores
from kvarn.pruning.probe import CutProbe
from kvarn.pruning.shapes import CutShape

DAMPING = 0.01  # of the mean of the diagonal, as in GPTQ: a text has not seen everything


@dataclass(frozen=True, slots=True)
class CutTrial:
    """A shape that was measured. kl: mean divergence from the source on the text, in nats, before any rounding."""

    shape: CutShape
    kl: float


@dataclass(slots=True)
class CutPlanner:
    """One source by one criterion. trials: everything measured so far."""

    weights: WeightSource
    spec: ModelSpec
    scores: PartScores
    probe: CutProbe
    refits: bool
    progress: OnProgress | None = None
    trials: list[CutTrial] = field(default_factory=list)

    def cut(self, shape: CutShape) -> Cut:
        """What stays by the scores."""
        kinds = layer_kinds(self.weights, self.spec, shape.layers)
        layers = kept_layers(self.spec, kinds, self.scores.layers())
        if layers is None:
            raise ConfigError(f"no choice of {shape.layers} layers keeps the order of this model's kinds of layers")
        return Cut(tuple(self._layer(layer, shape) for layer in layers))

    def measure(self, shape: CutShape) -> CutTrial:
        """What a shape costs; a shape is measured once."""
        known = next((trial for trial in self.trials if trial.shape == shape), None)
        if known is None:
            known = CutTrial(shape, self.divergence(self.cut(shape)))
            self.trials.append(known)
            if self.progress is not None:
                self.progress(len(self.trials), None, "shapes measured")
        return known

    def divergence(self, cut: Cut) -> float:
        """Mean KL of a cut."""
        stays = {one.layer: one for one in cut.layers}
        gone = [
            f"blk.{layer}.{kind}.weight"
            for layer in range(len(self.spec.blocks))
            if layer not in stays
            for kind in ("attn_output", "ffn_down")
        ]
        replaced = {name: np.zeros(self.weights.tensors[name].shape, np.float32) for name in gone}
        for (name, columns), values in zip(self._shortened(cut), self.fitted(cut).values(), strict=True):
            full = np.zeros(self.weights.tensors[name].shape, np.float32)
            full[:, columns] = values
            replaced[name] = full
        return self.probe.divergence(replaced) if replaced else 0.0

    def fitted(self, cut: Cut) -> dict[str, Float32]:
        """The values of every matrix that loses columns."""
        found = {}
        for name, columns in self._shortened(cut):
            values = self.weights.array(name)
            if self.refits:
                moments = self.scores.activations.of_matrix(name)
                assert moments is not None
                found[name] = refitted(values, moments, columns)
            else:
                found[name] = np.ascontiguousarray(values[:, columns])
        return found

    def _shortened(self, cut: Cut) -> list[tuple[str, Indices]]:
        """Matrices that lose columns, with those that stay."""
        return list(chain.from_iterable(self._of_layer(one) for one in cut.layers))

    def _of_layer(self, one: LayerCut) -> list[tuple[str, Indices]]:
        block = self.spec.blocks[one.layer]
        found = []
        if len(one.heads) < block.attention.num_heads:
            dim = block.attention.head_dim
            columns = (np.array(one.heads)[:, None] * dim + np.arange(dim)).reshape(-1)
            found.append((f"blk.{one.layer}.attn_output.weight", columns))
        if len(one.channels) < block.feed_forward.hidden:
            found.append((f"blk.{one.layer}.ffn_down.weight", np.array(one.channels)))
        return found

    def _layer(self, layer: int, shape: CutShape) -> LayerCut:
        attention, hidden = self.spec.blocks[layer].attention, self.spec.blocks[layer].feed_forward.hidden
        heads, kv_heads = tuple(range(attention.num_heads)), tuple(range(attention.num_kv_heads))
        if shape.kv_heads < attention.num_kv_heads:
            shared = attention.num_heads // attention.num_kv_heads
            kv_heads = best(self.scores.groups(layer), shape.kv_heads)
            heads = tuple(kv * shared + one for kv in kv_heads for one in range(shared))
        elif shape.heads < attention.num_heads:
            heads = self._best_queries(layer, shape)
        channels = tuple(range(hidden))
        if shape.hidden < hidden:
            channels = best(self.scores.channels(layer), shape.hidden)
        return LayerCut(layer, heads, kv_heads, channels)

    def _best_queries(self, layer: int, shape: CutShape) -> tuple[int, ...]:
        """The best query heads of each KV group."""
        groups = self.scores.heads(layer).reshape(shape.kv_heads, -1)
        each = shape.heads // shape.kv_heads
        return tuple(kv * groups.shape[1] + one for kv in range(shape.kv_heads) for one in best(groups[kv], each))


def refitted(weights: Float32, moments: Float32, columns: Indices) -> Float32:
    """The kept columns of a matrix, fitted to all of it; (rows, kept)."""
    kept = moments[np.ix_(columns, columns)].astype(np.float64)
    damping = DAMPING * float(kept.diagonal().mean()) or 1.0
    gone = np.setdiff1d(np.arange(weights.shape[1]), columns)
    # Only what the removed columns did is distributed, so that damping pulls towards the weights as they are.
    target = weights[:, gone].astype(np.float64) @ moments[np.ix_(gone, columns)]
    kept[np.diag_indices_from(kept)] += damping
    change = np.linalg.solve(kept, target.T).T
    return (weights[:, columns] + change).astype(np.float32)
