"""The split of a budget over layers, heads and channels that diverges least from the source, by measurement.

For each number of layers and heads the channels fill the budget. Layers are searched from coarse to fine; from the best
of them on, neighbours in layers and heads, as long as one is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvarn.pruning.planner import CutPlanner, CutTrial
from kvarn.pruning.shapes import CutBudget, CutShape, largest_hidden

COARSE_DEPTHS = 5
MIN_HIDDEN_SHARE = 0.25  # of the channels, to begin with: with fewer, fewer layers are better

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShapeSearch:
    """depths and heads: those there are, largest first; heads as (heads, KV heads). step: of the channels."""

    planner: CutPlanner
    whole: CutShape
    budget: CutBudget
    depths: Sequence[int]
    heads: Sequence[tuple[int, int]]
    step: int

    def run(self) -> CutTrial:
        """Measure splits of the budget and return the best one."""
        places = self._places(0) or [place for head in range(len(self.heads)) for place in self._places(head)]
        wide = [place for place in places if self._share(place) >= MIN_HIDDEN_SHARE]
        place, best = self._best(_spread(wide or places, COARSE_DEPTHS))
        while True:
            depth, heads = place
            near = [(depth + d, heads + h) for d in (-1, 0, 1) for h in (-1, 0, 1)]
            place, found = self._best(one for one in near if self._has(one))
            if found.kl >= best.kl:
                return best
            best = found

    def shape(self, depth: int, head: int) -> CutShape | None:
        """The shape that fills the budget with so many layers and heads; None where one more layer fits whole."""
        layers, (heads, kv_heads) = self.depths[depth], self.heads[head]
        hidden = self._hidden(layers, heads, kv_heads)
        if hidden is None:
            return None
        more = self.depths[max(0, depth - 1)]
        if more > layers and hidden == self.whole.hidden == self._hidden(more, heads, kv_heads):
            return None
        return CutShape(layers, hidden, heads, kv_heads)

    def _places(self, head: int) -> list[tuple[int, int]]:
        return [(depth, head) for depth in range(len(self.depths)) if self.shape(depth, head) is not None]

    def _share(self, place: tuple[int, int]) -> float:
        shape = self.shape(*place)
        return 0.0 if shape is None else shape.hidden / self.whole.hidden

    def _hidden(self, layers: int, heads: int, kv_heads: int) -> int | None:
        return largest_hidden(CutShape(layers, self.whole.hidden, heads, kv_heads), self.budget, self.step)

    def _has(self, place: tuple[int, int]) -> bool:
        depth, head = place
        inside = 0 <= depth < len(self.depths) and 0 <= head < len(self.heads)
        return inside and self.shape(depth, head) is not None

    def _best(self, places: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], CutTrial]:
        found = []
        for place in places:
            shape = self.shape(*place)
            assert shape is not None
            found.append((place, self.planner.measure(shape)))
        return min(found, key=lambda one: one[1].kl)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Some of the items, with the first and the last one."""
    count = min(len(items), most)
    picked = {round(i * (len(items) - 1) / max(1, count - 1)) for i in range(count)}
    return [items[i] for i in sorted(picked)]
