"""The float sources of the measurements: the same bytes each time, and on no type's grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvarn
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.weights import TensorType
from tests.float_model import write_float_model, write_text
from tests.float_source import off_its_grid
from tests.widened_source import widen


def test_a_source_off_its_grid_is_the_same_twice_and_half_a_step_away(tmp_path: Path) -> None:
    floats = write_float_model(tmp_path / "model.gguf")
    kvarn.quantize(floats, "Q4_K_M", tmp_path / "small.gguf")
    once, again = (off_its_grid(tmp_path / "small.gguf", tmp_path / name) for name in ("once.gguf", "again.gguf"))
    assert once.read_bytes() == again.read_bytes()
    before, after = GGUFFile(tmp_path / "small.gguf"), GGUFFile(once)
    for name, info in before.tensors.items():
        values, moved = before.array(name), after.array(name)
        if len(info.shape) < 2:
            assert np.array_equal(values, moved)
            continue
        assert after.tensors[name].type is TensorType.F16
        distinct = np.unique(moved.reshape(-1, 32)[0])
        assert len(distinct) > 24  # a block of a grid has sixteen values at most
        assert np.abs(moved - values).max() < 0.2 * np.abs(values).max()


def test_a_widened_model_predicts_the_same_from_rows_that_k_quants_fit(tmp_path: Path) -> None:
    source = write_float_model(tmp_path / "source.gguf", width=192, hidden=256)
    wide = widen(source, tmp_path / "wide.gguf")
    text, options = write_text(tmp_path / "text.txt"), kvarn.EvaluationOptions(chunks=2, context=64)
    found = kvarn.evaluate(wide, text=text, against=source, options=options).divergence
    assert found is not None
    assert found.kl_max < 1e-4
    rows = {
        info.shape[-1]
        for name, info in GGUFFile(wide).tensors.items()
        if name.endswith(("attn_q.weight", "ffn_up.weight"))
    }
    assert rows == {256}
