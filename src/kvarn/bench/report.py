"""Measured figures as plain values, with the machine they were measured on: without it they mean nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.bench.model import Figures
from kvarn.bench.rows import Row, Samples
from kvarn.machine import available_memory, choose_threads


def report(figures: Figures) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    limits = figures.limits
    return {
        "bench": "model",
        "model": figures.spec.name,
        "isa": figures.isa,
        "threads": figures.threads,
        "limits": limits and {"read_gbps": limits.read_gbps, "dot_gops": limits.dot_gops, "table": limits.table},
        "machine": describe_machine(),
        "rows": {row.name: _row_report(figures, row, samples) for row, samples in figures.samples.items()},
    }


def _row_report(figures: Figures, row: Row, samples: Samples) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens_per_s": round(samples.median, 2),
        "spread": round(samples.spread, 4),
        "samples": [round(value, 2) for value in samples.values],
    }
    if figures.limits is not None:
        ceiling = figures.work.ceiling(row, figures.limits)
        found |= {
            "ceiling": round(ceiling.tokens_per_s, 1),
            "of_ceiling": round(samples.median / ceiling.tokens_per_s, 4),
            "bound": ceiling.bound,
        }
    return found


def describe_machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, system, Python, and how busy it was."""
    return {
        "processor": _processor(),
        "cores": choose_threads().count,
        "memory_bytes": available_memory().total_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": [round(value, 2) for value in _load()],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _load() -> Sequence[float]:
    return os.getloadavg() if hasattr(os, "getloadavg") else ()
