"""Views: names, slices, stacks and shifts of another source's tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import FormatError
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.hf_names import canonical_view, translate
from kvarn.formats.open import open_weights
from kvarn.formats.tensor_view import WeightView, renamed, row_slice, shifted, stacked
from kvarn.formats.weights import TensorType, WeightSource
from tests.tiny_models import tiny_model

VALUES = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path) -> WeightSource:
    tensors = {
        "fused": Stored.quantized(VALUES, TensorType.Q4_0),
        "a": Stored.quantized(VALUES, TensorType.Q8_0),
        "b": Stored.quantized(-VALUES, TensorType.Q8_0),
        "vector": VALUES[0],
    }
    write_gguf(tmp_path / "file.gguf", {"general.architecture": "none"}, tensors)
    return open_weights(tmp_path / "file.gguf")


def test_a_slice_of_quantised_rows_is_a_slice_of_bytes(source: WeightSource) -> None:
    view = WeightView(source, {"k": row_slice(renamed(source.tensors["fused"], "fused"), "k", 2, 3)})
    assert view.tensors["k"].shape == (3, 64)
    assert view.tensors["k"].num_bytes == view.raw("k").size == 3 * 2 * 18
    np.testing.assert_array_equal(view.raw("k"), source.raw("fused")[2 * 36 : 5 * 36])
    np.testing.assert_array_equal(view.array("k"), source.array("fused")[2:5])
    assert np.shares_memory(view.raw("k"), source.raw("fused"))


def test_rows_beyond_the_tensor_are_refused(source: WeightSource) -> None:
    with pytest.raises(FormatError, match="has 6 rows"):
        row_slice(renamed(source.tensors["fused"], "fused"), "k", 4, 3)


def test_a_stack_has_a_new_first_axis(source: WeightSource) -> None:
    view = WeightView(source, {"ab": stacked("ab", (renamed(source.tensors[n], n) for n in "ab"))})
    assert view.tensors["ab"].shape == (2, 6, 64)
    np.testing.assert_array_equal(view.array("ab"), np.stack([source.array("a"), source.array("b")]))
    np.testing.assert_array_equal(view.raw("ab"), np.concatenate([source.raw("a"), source.raw("b")]))


def test_unlike_tensors_cannot_be_stacked(source: WeightSource) -> None:
    with pytest.raises(FormatError, match="all experts must be alike"):
        stacked("x", (renamed(source.tensors[n], n) for n in ("a", "fused")))


def test_a_shifted_tensor_is_stored_as_floats(source: WeightSource) -> None:
    view = WeightView(source, {"v": shifted(renamed(source.tensors["vector"], "v"), 1.0)})
    assert view.tensors["v"].type is TensorType.F32
    np.testing.assert_array_equal(view.array("v"), VALUES[0] + 1)
    np.testing.assert_array_equal(view.raw("v").view(np.float32), VALUES[0] + 1)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
        ("language_model.model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
        ("model.language_model.norm.weight", "output_norm.weight"),
        ("model.layers.0.self_attn.rotary_emb.weight", None),
        ("model.layers.0.self_attn.q_proj.scales", None),
        ("nonsense", None),
    ],
)
def test_names_are_translated_by_the_table(name: str, canonical: str | None) -> None:
    assert translate(name, "decoder") == canonical


def test_the_norm_after_attention_has_another_name_in_a_sandwich() -> None:
    name = "model.layers.0.post_attention_layernorm.weight"
    assert translate(name, "decoder") == "blk.0.ffn_norm.weight"
    assert translate(name, "sandwich") == "blk.0.post_attention_norm.weight"


def test_fused_experts_are_the_same_as_single_ones(tmp_path: Path) -> None:
    single = open_weights(tiny_model("qwen3moe", tmp_path))
    view = canonical_view(single, "decoder")
    gate, up = (view.array(f"blk.0.ffn_{n}_exps.weight") for n in ("gate", "up"))
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": np.concatenate([gate, up], axis=1),
        "model.layers.0.mlp.experts.down_proj": view.array("blk.0.ffn_down_exps.weight"),
    }
    write_gguf(tmp_path / "fused.gguf", {"general.architecture": "none"}, tensors)
    fused = canonical_view(open_weights(tmp_path / "fused.gguf"), "decoder")
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(
            fused.array(f"blk.0.ffn_{name}_exps.weight"), view.array(f"blk.0.ffn_{name}_exps.weight")
        )
        assert fused.tensors[f"blk.0.ffn_{name}_exps.weight"] == view.tensors[f"blk.0.ffn_{name}_exps.weight"]
