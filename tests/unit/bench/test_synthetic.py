"""Random models: valid files of the right size, sane values, read by an oracle and run by us."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvarn.bench.synthetic import FILE_TYPES, SHAPES, ModelShape, shapes_of, tensor_types, write_model, write_shape
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.models.spec import MaskedDiffusion
from kvarn.tokenizer import load_tokenizer
from tests.unit.bench.conftest import TINY


@pytest.mark.parametrize("type", FILE_TYPES)
def test_every_type_gives_weights_near_unit_gain(type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_shape(path, TINY, type, "tiny")
    source = open_weights(path)
    describe(source)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"):
        values = source.array(name)
        assert np.isfinite(values).all()
        assert values.std() * math.sqrt(values.shape[-1]) == pytest.approx(1, abs=0.1)
        assert abs(values.mean()) < 0.2 * values.std()


def test_an_oracle_reads_the_same_tensors(tiny: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny).tensors}
    source = open_weights(tiny)
    assert tensors.keys() == source.tensors.keys()
    tensor = tensors["blk.1.ffn_up.weight"]
    oracle = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(512, 256)
    np.testing.assert_array_equal(source.array(tensor.name), oracle)


def test_the_tokenizer_gives_text_back(tiny: Path) -> None:
    tokenizer = load_tokenizer(open_weights(tiny))
    ids = tokenizer.encode("ab, öl", add_special=False)
    assert tokenizer.decode(ids) == "ab, öl"


# Megabytes of weights in performance.md; a matching file has the rules of llama.cpp's quantiser right.
@pytest.mark.parametrize(
    ("shape", "type", "megabytes"),
    [
        ("qwen2.5-0.5b", "Q4_0", 346),
        ("qwen2.5-0.5b", "Q4_K_M", 392),
        ("qwen2.5-0.5b", "Q8_0", 525),
        ("qwen2.5-1.5b", "Q4_K_M", 980),
    ],
)
def test_files_have_the_size_of_the_real_ones(shape: str, type: str, megabytes: int) -> None:
    assert _num_bytes(SHAPES[shape], type) / 1e6 == pytest.approx(megabytes, abs=0.5)


def test_a_mix_gives_more_bits_to_some_layers_and_the_head() -> None:
    types = tensor_types(SHAPES["llama-3.1-8b"], "Q4_K_M")
    assert types["output.weight"] is TensorType.Q6_K
    assert types["token_embd.weight"] is types["blk.0.ffn_up.weight"] is TensorType.Q4_K
    assert types["blk.0.ffn_down.weight"] is types["blk.31.attn_v.weight"] is TensorType.Q6_K
    assert types["blk.5.ffn_down.weight"] is TensorType.Q4_K


def test_rows_no_multiple_of_256_fall_back_to_smaller_blocks() -> None:
    types = tensor_types(SHAPES["qwen2.5-0.5b"], "Q4_K_M")
    assert types["blk.0.attn_q.weight"] is TensorType.Q5_0
    assert types["token_embd.weight"] is TensorType.Q8_0


def test_a_large_matrix_repeats_random_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarn.bench.synthetic.TILE_BYTES", 4096)
    path, done = tmp_path / "model.gguf", []
    write_shape(path, replace(TINY, vocab=640), "Q8_0", "tiny", lambda *progress: done.append(progress))
    rows = open_weights(path).array("token_embd.weight").reshape(-1, 10, 256)
    assert (rows == rows[0]).all()
    assert done[-1] == (_num_bytes(replace(TINY, vocab=640), "Q8_0"),) * 2


@pytest.mark.parametrize(("shape", "type"), [("gpt-5", "Q4_0"), ("qwen2.5-0.5b", "Q1_0")])
def test_an_unknown_shape_or_type_is_refused_with_the_known_ones(shape: str, type: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"choose one of .*(llama-3\.1-8b|Q4_K_M)"):
        write_model(tmp_path / "model.gguf", shape, type)
    assert not list(tmp_path.iterdir())


def _num_bytes(shape: ModelShape, type: str) -> int:
    types = tensor_types(shape, type)
    return sum(types[name].num_bytes(math.prod(size)) for name, size in shapes_of(shape).items())


def test_a_diffusion_shape_is_one(tmp_path: Path) -> None:
    small = replace(SHAPES["llada-small"], layers=1, width=64, hidden=64, heads=2, kv_heads=2, vocab=400, mask_id=300)
    write_shape(tmp_path / "model.gguf", small, "Q4_0", "small")
    source = open_weights(tmp_path / "model.gguf")
    assert describe(source).spec.generation == MaskedDiffusion(300, shift=False, block=None)
    assert load_tokenizer(source).encode("ab", add_special=False) == [256]
