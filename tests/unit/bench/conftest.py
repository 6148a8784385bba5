"""A tiny model of no real shape, written by the synthetic maker."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.bench.synthetic import ModelShape, write_shape

TINY = ModelShape("llama", 2, 256, 512, 4, 2, 512, 2048, 1e4, 1e-5, "smollm")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny-Q4_0.gguf"
    write_shape(path, TINY, "Q4_0", "tiny")
    return path
