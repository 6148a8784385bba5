"""A count-min sketch with conservative update and decay: recent frequencies in a fixed table, never too low.

Cormode and Muthukrishnan 2005; conservative update: Estan and Varghese 2002. An estimate exceeds the true (decayed)
count by at most e / width of all counts, but for one case in e^depth.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable

import numpy as np

MAX_SCALE = 2.0**40  # beyond it the table is divided by the scale, before floats lose the small counts


class CountMinSketch:
    """Counts that halve every half_life_s. For one thread at a time."""

    def __init__(
        self,
        width: int = 4096,
        depth: int = 4,
        half_life_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = np.zeros((depth, width))
        self._rows = np.arange(depth)
        self._rate = math.log(2.0) / half_life_s
        self._clock = clock
        self._origin = clock()

    def add(self, item: str, by: float = 1.0) -> float:
        """Count an item; returns the estimate with it."""
        # Instead of shrinking all counts, new ones weigh more: the table holds counts as of the origin.
        scale = self._scale()
        columns = self._columns(item)
        cells = self._table[self._rows, columns]
        raised = cells.min() + by * scale
        self._table[self._rows, columns] = np.maximum(cells, raised)
        return float(raised / scale)

    def estimate(self, item: str) -> float:
        """At least the decayed count of an item."""
        scale = self._scale()  # before reading: it may rescale the table
        return float(self._table[self._rows, self._columns(item)].min() / scale)

    def _scale(self) -> float:
        scale = math.exp(min(self._rate * (self._clock() - self._origin), 700.0))
        if scale > MAX_SCALE:
            self._table /= scale
            self._origin = self._clock()
            scale = 1.0
        return scale

    def _columns(self, item: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        depth, width = self._table.shape
        digest = hashlib.blake2b(item.encode("utf-8", "surrogatepass"), digest_size=8 * depth).digest()
        return (np.frombuffer(digest, np.uint64) % width).astype(np.int64)
