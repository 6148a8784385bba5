"""Float matrices that are held as Q8_0: which ones, and how close they stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvarn.formats.open import open_weights
from kvarn.formats.recast_weights import Q8Weights
from kvarn.formats.weights import TensorType
from tests.tiny_models import tiny_model


def test_matrices_of_layers_become_q8_0_and_nothing_else_does(tmp_path: Path) -> None:
    source = open_weights(tiny_model("bert", tmp_path, "gguf", wide=True))
    quantised = Q8Weights(source)
    changed = {name for name, info in quantised.tensors.items() if info.type is TensorType.Q8_0}
    assert {name.split(".")[2] for name in changed} == {
        *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    }
    for name, info in quantised.tensors.items():
        exact, held = source.array(name), quantised.array(name)
        assert quantised.raw(name).size == info.num_bytes
        assert held.shape == exact.shape
        if name not in changed:
            assert (held == exact).all()
            continue
        blocks, error = (values.reshape(-1, 32) for values in (exact, np.abs(held - exact)))
        steps = np.abs(blocks).max(axis=1, keepdims=True) / 127
        assert (error <= 0.57 * steps).all()  # half a step, and f16's rounding of the scale at 127 steps


def test_rows_that_do_not_fill_blocks_stay_as_they_are(tmp_path: Path) -> None:
    source = open_weights(tiny_model("bert", tmp_path, "gguf"))
    quantised = Q8Weights(source)
    for name, info in quantised.tensors.items():
        assert info.type is source.tensors[name].type or info.shape[-1] % 32 == 0
