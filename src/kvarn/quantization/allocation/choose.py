"""The cheapest choice of one option for each item within a budget: a knapsack, solved on a fine grid of sizes.

Pure arithmetic over bytes and costs; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GRID = 1 << 16  # steps of the budget beyond what the smallest options take


@dataclass(frozen=True, slots=True)
class SizedOption:
    """Bytes and what they cost."""

    num_bytes: int
    cost: float


def choose(items: Sequence[Sequence[SizedOption]], budget_bytes: int) -> list[int]:
    """The index of an option for each item: least cost in all, at most so many bytes; some must fit.

    Sizes are rounded up to the grid, so that the sum never passes the budget; what is left over by that is then given
    to the single changes that gain most.
    """
    smallest = [min(range(len(options)), key=lambda i: _key(options[i])) for options in items]
    floor = sum(options[index].num_bytes for options, index in zip(items, smallest, strict=True))
    spare = budget_bytes - floor
    assert spare >= 0, "the budget is below the smallest possible"
    unit = max(1, -(-spare // GRID))
    size = spare // unit + 1
    costs = np.zeros(size)
    picks: list[npt.NDArray[np.int16]] = []
    for options, index in zip(items, smallest, strict=True):
        costs, pick = _with_item(costs, options, options[index].num_bytes, unit)
        picks.append(pick)
    at, chosen = int(costs.argmin()), []
    for options, index, pick in zip(reversed(items), reversed(smallest), reversed(picks), strict=True):
        option = int(pick[at])
        chosen.append(option)
        at -= -(-(options[option].num_bytes - options[index].num_bytes) // unit)
    return _filled(items, chosen[::-1], budget_bytes)


def _with_item(
    costs: npt.NDArray[np.float64], options: Sequence[SizedOption], floor: int, unit: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """costs[u]: the least of all items so far with at most u units; with one more item, and what it took."""
    best = np.full_like(costs, np.inf)
    pick = np.zeros(len(costs), np.int16)
    for number, option in enumerate(options):
        units = -(-(option.num_bytes - floor) // unit)
        if units >= len(costs):
            continue
        with_it = np.full_like(costs, np.inf)
        with_it[units:] = costs[: len(costs) - units] + option.cost
        is_better = with_it < best
        best[is_better] = with_it[is_better]
        pick[is_better] = number
    return best, pick


def _filled(items: Sequence[Sequence[SizedOption]], chosen: list[int], budget_bytes: int) -> list[int]:
    left = budget_bytes - sum(options[index].num_bytes for options, index in zip(items, chosen, strict=True))
    while True:
        gains = [
            ((now.cost - option.cost) / (option.num_bytes - now.num_bytes), item, number)
            for item, options in enumerate(items)
            for now in (options[chosen[item]],)
            for number, option in enumerate(options)
            if now.num_bytes < option.num_bytes <= now.num_bytes + left and option.cost < now.cost
        ]
        if not gains:
            return chosen
        _, item, number = max(gains)
        left -= items[item][number].num_bytes - items[item][chosen[item]].num_bytes
        chosen[item] = number


def _key(option: SizedOption) -> tuple[int, float]:
    return option.num_bytes, option.cost
