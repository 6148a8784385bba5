"""The ratios to reach, ours to the best peer of the row in the same run, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Goal = TypeVar("Goal")

Goals = dict[str, dict[str, float]]  # pattern of the model file's name -> row -> ratio

# Beside peers that have AVX2 only, or where our kernels use no more.
GOALS: Goals = {
    r"smollm2.*q4_0": {"prefill-128": 1.5, "decode": 1.35},
    r"smollm2": {
        "prefill-128": 1.4,
        "prefill-512": 1.5,
        "decode": 1.7,
        "decode-1024": 2.2,
        "batch-8": 2.5,
        "batch-16": 2.8,
        "batch-32": 2.7,
    },
    r"qwen2\.5-0\.5b.*q4_0": {"prefill-512": 1.5, "decode": 1.35, "decode-1024": 1.6, "batch-8": 2.5, "batch-32": 3.0},
    r"qwen2\.5-(coder-)?0\.5b(.*q4_k_m|$)": {"prefill-512": 2.6, "decode": 1.5, "decode-1024": 1.8},
    r"qwen2\.5-0\.5b.*q8_0": {"prefill-512": 1.9, "decode": 1.3},
    r"llama-3\.2-1b.*q4_0": {"decode": 1.35},
    r"llama-3\.2-1b.*q4_k_m": {"decode": 1.25},
    r"llama-3\.2-1b.*q8_0": {"decode": 1.1},
}

# The second round, by our kernel table: today's server cores.
_SMALL = {"prefill-128": 1.5, "prefill-512": 1.5, "decode": 2.2, "batch-8": 2.5, "batch-32": 2.5}
_K_QUANTS = {"prefill-128": 3.0, "prefill-512": 3.0, "decode": 1.8, "batch-32": 4.0}
GOALS_BY_TABLE: dict[str, Goals] = {
    "avx512_vnni": {
        r"smollm2(?!.*q4_0)": _SMALL | {"decode-1024": 2.0, "decode-4096": 2.0},
        r"qwen2\.5-(coder-)?(0\.5b|1\.5b)(.*q4_k_m|$)": _K_QUANTS,
    },
}

# pattern -> row of users.py -> least ratio to the best peer, most seconds to the first token, most memory
SERVER_GOALS: dict[str, dict[str, dict[str, float]]] = {
    r"smollm2": {
        "users-8": {"ratio": 2.6, "first_s": 1.2, "rss_mb": 450.0},
        "shared-32": {"ratio": 4.0, "first_s": 3.0},
    },
}

# pattern -> most seconds from a cold process to its first token, most memory of one user
COLD_GOALS: dict[str, dict[str, float]] = {
    r"smollm2": {"first_s": 0.5, "rss_mib": 260.0},
    r"qwen2\.5-0\.5b.*q4_0": {"first_s": 1.8, "rss_mib": 560.0},
}


def goals_of(model: str, table: str | None = None) -> dict[str, float]:
    """Goals for a file by its name without the ending and our kernel table; the first pattern that fits counts."""
    return _first(GOALS_BY_TABLE.get(table or "", {}), model) or _first(GOALS, model)


def server_goals_of(model: str, row: str) -> dict[str, float]:
    """Goals of a row of users.py."""
    return _first(SERVER_GOALS, model).get(row, {})


def cold_goals_of(model: str) -> dict[str, float]:
    """Goals of cold.py."""
    return _first(COLD_GOALS, model)


def _first(table: Mapping[str, dict[str, Goal]], model: str) -> dict[str, Goal]:
    return next((goals for pattern, goals in table.items() if re.match(pattern, model.lower())), {})
