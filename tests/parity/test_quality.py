"""How close the native arithmetic stays to exact arithmetic on running text, beside llama.cpp on the same tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.quality import measure

from tests.assets import gemma3, qwen_coder, smollm2

if TYPE_CHECKING:
    from tests.conftest import Record, Size

pytestmark = pytest.mark.model
LONG = pytest.mark.long

# Mean KL that llama.cpp reaches over the full text (benchmarks/results/quality-*.json): the yardstick where it is not
# installed. A few hundred tokens scatter around the mean, so the short form may be half as far again.
LLAMA_CPP_KL = {"smollm2": 0.0030, "gemma3": 0.0124, "qwen_coder": 0.00076}


@pytest.mark.parametrize(
    "model",
    [smollm2, pytest.param(gemma3, marks=LONG), pytest.param(qwen_coder, marks=LONG)],
    ids=lambda model: model.__name__,
)
def test_divergence_from_exact_arithmetic_is_no_worse_than_llama_cpp(
    model: Callable[[], Path], size: Size, is_long: bool, record: Record
) -> None:
    with_peer = is_long and importlib.util.find_spec("llama_cpp") is not None
    found = measure(model(), num_tokens=size(128, 4096), window=size(128, 1024), with_peer=with_peer)
    record(f"quality-{model.__name__}", {name: asdict(divergence) for name, divergence in found.items()})
    ours = found["native"]
    if not with_peer:
        assert ours.kl <= 1.5 * LLAMA_CPP_KL[model.__name__]
        return
    peer = found["llama.cpp"]
    assert ours.kl <= 1.05 * peer.kl
    assert ours.top1 >= peer.top1 - 0.002
