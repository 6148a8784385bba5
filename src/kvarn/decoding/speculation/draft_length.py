"""How many drafted rows a step has: as many as make tokens come fastest, by what steps were measured to take.

Rows and seconds in, rows out; knows no request and no model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

NUM_SAMPLES = 5  # of steps with the same number of rows; their median ignores outliers
MAX_AGE = 128  # steps, after which a number of rows is measured again
FIRST_ROW_COST = 0.06  # of the step without it, for a drafted row, until it is measured
REUSE = 8  # steps for which what was worked out from the samples is used again, unless a number of rows is new
MIN_GAIN = 1.03  # tokens per second, for which guesses are worth a try


class RowCosts:
    """Seconds of a step by its rows, from the steps themselves; a step with more rows takes no less time."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._seen_in: dict[int, int] = {}
        self._num_steps = 0
        self._curves: dict[int, list[float]] = {}  # of seconds(), by its first number of rows
        self._curves_from = 0  # steps when the first of them was made

    def observe(self, num_rows: int, seconds: float) -> None:
        self._num_steps += 1
        is_new = self._num_steps - self._seen_in.get(num_rows, -MAX_AGE) >= MAX_AGE
        if is_new:
            self._samples[num_rows] = deque(maxlen=NUM_SAMPLES)
        if is_new or self._num_steps - self._curves_from >= REUSE:
            self._curves.clear()
            self._curves_from = self._num_steps
        self._samples[num_rows].append(seconds)
        self._seen_in[num_rows] = self._num_steps

    def seconds(self, num_rows: int, most: int) -> list[float] | None:
        """Of steps with num_rows .. most rows, or some more; None: num_rows has not been measured lately."""
        curve = self._curves.get(num_rows)
        if curve is None or len(curve) <= most - num_rows:
            curve = self._curve(num_rows, most)
            if curve is not None:
                self._curves[num_rows] = curve
        return curve

    def _curve(self, num_rows: int, most: int) -> list[float] | None:
        oldest = self._num_steps - MAX_AGE
        known = {rows: median(self._samples[rows]) for rows, seen in self._seen_in.items() if seen > oldest}
        if num_rows not in known:
            return None
        points = sorted((rows, found) for rows, found in known.items() if rows >= num_rows)
        base_s, found = points[0][1], list[float]()
        for (low, low_s), (high, high_s) in pairwise(points):
            found += [low_s + (high_s - low_s) * step / (high - low) for step in range(high - low)]
        first, last_s = points[-1]
        found += [last_s + FIRST_ROW_COST * base_s * step for step in range(max(0, most - first) + 1)]
        for index in range(len(found) - 2, -1, -1):
            found[index] = min(found[index], found[index + 1])
        return found[: most - num_rows + 1]


class ByCost:
    """Takes the number of drafted rows that gives most tokens per second, within max_stretch x the step without."""

    def __init__(self, max_stretch: float) -> None:
        self._max_stretch = max_stretch
        self._costs = RowCosts()

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step without prompt rows."""
        self._costs.observe(num_rows, seconds)

    def may_pay(self, num_decodes: int, most: int) -> bool:
        """Whether drafts that were always right would be worth their rows."""
        seconds = self._costs.seconds(num_decodes, num_decodes + most)
        if seconds is None:
            return False
        worth_s, limit_s = seconds[0] / num_decodes / MIN_GAIN, self._max_stretch * seconds[0]
        for count in range(1, most + 1):  # mostly the first says so
            if seconds[count] > limit_s:
                return False
            if seconds[count] < worth_s * (num_decodes + count):
                return True
        return False

    def spare_s(self, num_decodes: int) -> float:
        """How much longer than without drafts a step may take."""
        seconds = self._costs.seconds(num_decodes, num_decodes)
        return 0.0 if seconds is None else (self._max_stretch - 1.0) * seconds[0]

    def num_rows(self, num_decodes: int, gains: Sequence[float], row_s: float = 0.0) -> int:
        """How many of the drafts to compute; gains: the chance of each to be right, the best first.

        row_s: seconds that making each of them takes, beside its row.
        """
        seconds = self._costs.seconds(num_decodes, num_decodes + len(gains))
        if seconds is None:
            return 0
        limit_s, plain_s = self._max_stretch * seconds[0], seconds[0] / num_decodes
        best, least_s = 0, plain_s / MIN_GAIN
        for count, gain in enumerate(accumulate(gains), 1):
            step_s = seconds[count] + count * row_s
            if step_s <= limit_s and step_s / (num_decodes + gain) < least_s:
                best, least_s = count, step_s / (num_decodes + gain)
        return best


class Always:
    """As many as there are: for tests, where no clock may decide."""

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn nothing."""

    def may_pay(self, num_decodes: int, most: int) -> bool:  # noqa: ARG002
        return True

    def spare_s(self, num_decodes: int) -> float:  # noqa: ARG002
        return math.inf

    def num_rows(self, num_decodes: int, gains: Sequence[float], row_s: float = 0.0) -> int:  # noqa: ARG002
        return len(gains)
