"""What the model-level benchmark measures, as data: the same rows for Kvarn and for every peer.

A row is a prefill of `prompt` tokens, or steps of `batch` sequences that each add one token to `depth` cached ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from kvarn.errors import ConfigError

PREFIX_TOKENS, PREFIX_SEQUENCES = 400, 32


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Exactly one of prompt and batch is not 0."""

    name: str
    prompt: int = 0
    batch: int = 0
    depth: int = 0
    is_shared: bool = False  # the sequences have their first `depth` tokens in common

    @property
    def is_prefill(self) -> bool:
        return self.prompt > 0


ALL_ROWS: tuple[Row, ...] = (
    Row("prefill-128", prompt=128),
    Row("prefill-512", prompt=512),
    Row("decode", batch=1),
    *(Row(f"decode-{depth}", batch=1, depth=depth) for depth in (1024, 4096, 16384)),
    *(Row(f"batch-{batch}", batch=batch) for batch in (2, 4, 8, 16, 32)),
    Row(f"prefix-{PREFIX_SEQUENCES}", batch=PREFIX_SEQUENCES, depth=PREFIX_TOKENS, is_shared=True),
)
# What is measured unless rows are named: not every model has the context of the deep ones.
ROWS = tuple(row for row in ALL_ROWS if row.depth <= 1024)


def select_rows(names: Iterable[str]) -> tuple[Row, ...]:
    """The rows called names, in the table's order; without names those that every model can run."""
    wanted = set(names)
    unknown = sorted(wanted - {row.name for row in ALL_ROWS})
    if unknown:
        known = ", ".join(row.name for row in ALL_ROWS)
        raise ConfigError(f"rows is {unknown[0]!r:.60}; choose from {known}")
    return tuple(row for row in ALL_ROWS if row.name in wanted) if wanted else ROWS


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one row, in tokens a second."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Distance of the extremes, as a share of the median."""
        return (max(self.values) - min(self.values)) / self.median
