"""Kvarn: the same code as `kvarn bench model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvarn
from kvarn.bench.limits import measure_limits
from kvarn.bench.model import ModelRuns, open_runs
from kvarn.bench.rows import Row
from kvarn.config import EngineConfig

MAX_STEPS = 256


def version() -> str:
    return f"kvarn {kvarn.__version__}"


def open_engine(model: Path, threads: int, rows: Sequence[Row]) -> Ours:
    return Ours(open_runs(model, rows, MAX_STEPS, EngineConfig(threads=threads)))


class Ours:
    def __init__(self, runs: ModelRuns) -> None:
        self._runs = runs

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        return self._runs.tokens_per_s(row, steps)

    def roofline(self) -> dict[str, Any]:
        """This machine's limits, measured beside the rows, and the ceilings they set for this model."""
        limits = measure_limits(self._runs.threads, self._runs.isa or None)
        if limits is None:
            return {}
        ceilings = {row.name: self._runs.work.ceiling(row, limits).tokens_per_s for row in self._runs.runs}
        return {
            "isa": self._runs.isa,
            "limits": {"read_gbps": limits.read_gbps, "dot_gops": limits.dot_gops},
            "ceilings": {name: round(value, 1) for name, value in ceilings.items()},
        }
