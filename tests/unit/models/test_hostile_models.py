"""Model files made to mislead: numbers in names, names of megabytes, side tensors that are not numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.reference.layers import activate, gated, sigmoid
from kvarn.errors import MAX_MESSAGE, FormatError, ModelError, UnsupportedModel
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.hf_names import layer_of, translate
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.quantization.imatrix import read_imatrix
from tests.tiny_models import tiny_model

MANY_DIGITS = "9" * 5000  # more than int() takes


def _with_tensors(path: Path, extra: dict[str, np.ndarray]) -> Path:
    tensors = load_file(path / "model.safetensors") | extra
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("number", [MANY_DIGITS, "٣", "007", "12345"])
@pytest.mark.parametrize("name", ["layers.{}.mlp.experts.0.w1.weight", "layers.0.mlp.experts.{}.w1.weight"])
def test_a_number_in_a_name_that_no_model_writes_is_an_unknown_name(name: str, number: str, tmp_path: Path) -> None:
    stray = f"model.{name.format(number)}"
    path = _with_tensors(tiny_model("mixtral", tmp_path), {stray: np.zeros((96, 64), np.float32)})
    with pytest.raises(UnsupportedModel, match="has no tensors"):
        describe(open_weights(path))
    assert layer_of(f"blk.{number}.attn_q.weight") is None
    assert translate(f"model.layers.{number}.self_attn.q_proj.weight", "decoder") is None


@pytest.mark.parametrize("value", ["many", -1, [1, 2]])
def test_an_importance_matrix_with_a_count_that_is_none_is_refused(value: object, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    stored = {"a.in_sum2": Stored.quantized(np.ones((1, 4), np.float32), TensorType.F32)}
    stored["a.counts"] = Stored.quantized(np.ones((1, 1), np.float32), TensorType.F32)
    write_gguf(path, {"general.type": "imatrix", "imatrix.chunk_count": value}, stored)
    with pytest.raises(FormatError, match="chunk_count"):
        read_imatrix(path)


@pytest.mark.parametrize("name", ["x" * 2_000_000, "model.layers.0." + "y" * 2_000_000 + ".weight"])
def test_a_message_about_a_name_of_megabytes_is_short(name: str, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    with pytest.raises(ModelError) as error:
        describe(open_weights(_with_tensors(path, {name: np.zeros((2, 2), np.float32)})))
    assert len(str(error.value)) <= MAX_MESSAGE
    assert str(error.value).endswith("choose another model")
    assert all(len(field) <= MAX_MESSAGE for field in getattr(error.value, "fields", ()))


def test_a_message_about_a_type_of_a_name_of_megabytes_is_short(tmp_path: Path) -> None:
    path = _with_tensors(tiny_model("llama", tmp_path), {"x" * 2_000_000: np.zeros((2, 2), np.int64)})
    with pytest.raises(ModelError) as error:
        open_weights(path)
    assert len(str(error.value)) <= MAX_MESSAGE


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "model.norm.weight"),
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("bert", "embeddings.LayerNorm.bias"),
    ],
)
def test_a_side_tensor_that_is_not_finite_is_refused_by_name(arch: str, name: str, bad: float, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path)
    values = load_file(path / "model.safetensors")[name]
    values.reshape(-1)[-1] = bad
    with pytest.raises(FormatError, match=r"tensor \S+ has NaN or infinite values"):
        describe(open_weights(_with_tensors(path, {name: values})))


def test_a_rope_factor_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tiny_model("phi3-longrope", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"]["short_factor"][0] = 1e300  # infinite as a float32
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="short_factor"):
        describe(open_weights(path))


@pytest.mark.parametrize("x", [-1e3, -1e35, -3e38])
def test_activations_of_large_negative_numbers_are_zero(x: float) -> None:
    gate = np.array([x, 1.0], np.float32)
    assert activate(gate, "silu")[0] == 0
    assert gated(gate, np.ones(2, np.float32), "swiglu_oai")[0] == 0
    assert sigmoid(gate)[0] == 0
