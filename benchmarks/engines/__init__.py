"""Ways to run a model file, ours and the peers': one module each, loaded only in the process that measures it.

A module has `open_engine(model, threads, rows) -> Engine` and `version() -> str`, or its engine has that where only a
run tells; importing it fails with ImportError where the engine is not installed.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

from kvarn.bench.rows import Row

# name for people -> module
ENGINES = {
    "kvarn": "ours",
    "xllamacpp": "xllama",
    "llama-cpp-python": "llama_python",
    "llama-bench": "llama_bench",
    "ik_llama": "ik_llama",
    "openvino": "openvino_cb",
    "transformers": "transformers_fp32",
}


class Engine(Protocol):
    """One loaded model."""

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        """Measure a row once; None: this engine cannot run it."""


def engine_module(name: str) -> ModuleType:
    """The module behind a name."""
    return importlib.import_module(f"benchmarks.engines.{ENGINES[name]}")


def random_ids(num_tokens: int, seed: int) -> list[int]:
    """Token ids that every vocabulary here has."""
    import numpy as np

    ids: list[int] = np.random.default_rng(seed).integers(1000, 20_000, num_tokens).tolist()
    return ids
