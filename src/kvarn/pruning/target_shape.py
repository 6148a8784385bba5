"""From what was asked for to shapes of the model: exact ones for parts, a budget and its search for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvarn.errors import ConfigError
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec
from kvarn.pruning.cut import Cut, LayerCut, PrunedWeights, parameters
from kvarn.pruning.families import possible_depths, prunable_parts, require_prunable
from kvarn.pruning.options import PruneTarget
from kvarn.pruning.planner import CutPlanner
from kvarn.pruning.search import ShapeSearch
from kvarn.pruning.shapes import (
    CutBudget,
    CutShape,
    cut_heads,
    cut_hidden,
    head_shapes,
    hidden_step,
    require_possible,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class ShapeTarget:
    """A target for one source. file_size: the bytes of a file of these weights."""

    weights: WeightSource
    spec: ModelSpec
    target: PruneTarget
    file_size: Callable[[PrunedWeights], int]

    def check(self) -> None:
        """Refuse what this model cannot become, before anything is measured."""
        parts = prunable_parts(self.weights, self.spec)
        for part in ("layers", "ffn", "heads"):
            if getattr(self.target, part):
                require_prunable(self.weights, self.spec, part)
        if self.target.is_budget:
            whole = shape_of(self.spec)
            heads, kv_heads = list(head_shapes(whole))[-1] if "heads" in parts else (whole.heads, whole.kv_heads)
            hidden = min(whole.hidden, hidden_step(self.weights, self.spec))
            require_possible(CutShape(self._depths()[-1], hidden, heads, kv_heads), self._budget())
        else:
            self._exact()

    def choose(self, planner: CutPlanner) -> CutShape:
        """The shape of least divergence among those asked for."""
        if not self.target.is_budget:
            return min((planner.measure(shape) for shape in self._exact()), key=lambda trial: trial.kl).shape
        whole = shape_of(self.spec)
        heads = [(whole.heads, whole.kv_heads)]
        if "heads" in prunable_parts(self.weights, self.spec):
            heads = list(head_shapes(whole))
        step = hidden_step(self.weights, self.spec)
        return ShapeSearch(planner, whole, self._budget(), self._depths(), heads, step).run().shape

    def _exact(self) -> list[CutShape]:
        whole, target = shape_of(self.spec), self.target
        depths, left = self._depths(), whole.layers - (target.layers or 0)
        if left < 1:
            raise ConfigError(
                f"layers is {target.layers}: the model has {whole.layers}, of which at least one stays; give at most "
                f"{whole.layers - 1}"
            )
        if left not in depths:
            possible = ", ".join(str(whole.layers - n) for n in depths if n < whole.layers)
            raise ConfigError(
                f"{target.layers} of {whole.layers} layers cannot go, as a file of the rest would run some of them as "
                f"another kind; possible: {possible}"
            )
        hidden = cut_hidden(whole.hidden, target.ffn or 0.0, hidden_step(self.weights, self.spec))
        ways = cut_heads(whole, target.heads) if target.heads else [(whole.heads, whole.kv_heads)]
        return [CutShape(left, hidden, heads, kv_heads) for heads, kv_heads in ways]

    def _depths(self) -> tuple[int, ...]:
        return possible_depths(self.weights, self.spec)

    def _budget(self) -> CutBudget:
        if self.target.num_bytes is not None:
            return CutBudget(
                self.target.num_bytes,
                "bytes",
                lambda shape: self.file_size(self._sample(shape)),
                lambda least: f"{least:,} bytes (--bytes {least})",
            )
        assert self.target.keep is not None
        total = parameters(self.weights.tensors)
        return CutBudget(
            int(self.target.keep * total),
            "weights in its layers",
            lambda shape: parameters(self._sample(shape).tensors),
            lambda least: f"{math.ceil(1e6 * least / total) / 1e6:g} of all (--keep)",
        )

    def _sample(self, shape: CutShape) -> PrunedWeights:
        """Some weights of a shape, whichever they are."""
        heads, kv_heads = tuple(range(shape.heads)), tuple(range(shape.kv_heads))
        channels = tuple(range(0, 2 * shape.hidden, 2))  # never whole blocks
        cut = Cut(tuple(LayerCut(layer, heads, kv_heads, channels) for layer in range(shape.layers)))
        return PrunedWeights(self.weights, self.spec, cut)
