"""One rank's slices of a model: together they are the whole, whatever the type, and what cannot be divided is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.torch.parallel.shards import ParallelShape, ShardWeights, check_divides, shard_spec
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import Description, describe
from kvarn.models.memory_plan import kv_token_bytes
from tests.tiny_models import tiny_model

WIDE = pytest.mark.parametrize("type", [TensorType.F32, TensorType.Q4_0, TensorType.Q4_K], ids=lambda t: t.name)


def _tiny(folder: Path, arch: str = "llama", type: TensorType = TensorType.F32, *, wide: bool = False) -> Description:
    return describe(open_weights(tiny_model(arch, folder, "gguf", type=type, wide=wide)))


def _parts(model: Description, shape: ParallelShape) -> list[ShardWeights]:
    return [ShardWeights(model.weights, model.spec, shape.place(rank)) for rank in range(shape.num_ranks)]


@WIDE
@pytest.mark.parametrize("tensor", [2, 4])
def test_rows_and_columns_of_all_parts_are_the_matrix(type: TensorType, tensor: int, tmp_path: Path) -> None:
    """Also where a quantised block of 256 would be cut: then the values are dequantised first."""
    model = _tiny(tmp_path, type=type, wide=True)
    parts = _parts(model, ParallelShape(tensor))
    for stem, axis in [("attn_q", 0), ("attn_output", 1), ("ffn_gate", 0), ("ffn_down", 1)]:
        name = f"blk.1.{stem}.weight"
        joined = np.concatenate([part.array(name) for part in parts], axis=axis)
        np.testing.assert_array_equal(joined, model.weights.array(name))


def test_rows_are_cut_from_the_files_bytes(tmp_path: Path) -> None:
    model = _tiny(tmp_path, type=TensorType.Q4_0)
    name = "blk.0.ffn_up.weight"
    parts = _parts(model, ParallelShape(4))
    assert np.concatenate([part.raw(name) for part in parts]).tobytes() == model.weights.raw(name).tobytes()
    assert {part.tensors[name].type for part in parts} == {TensorType.Q4_0}


def test_experts_are_cut_by_their_columns(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "qwen3moe", TensorType.Q4_0)
    parts = _parts(model, ParallelShape(2))
    for stem, axis in [("ffn_gate_exps", 1), ("ffn_up_exps", 1), ("ffn_down_exps", 2)]:
        joined = np.concatenate([part.array(f"blk.0.{stem}.weight") for part in parts], axis=axis)
        np.testing.assert_array_equal(joined, model.weights.array(f"blk.0.{stem}.weight"))


def test_fewer_kv_heads_than_parts_are_copied(tmp_path: Path) -> None:
    model, shape = _tiny(tmp_path), ParallelShape(4)
    whole = model.weights.array("blk.0.attn_k.weight").reshape(2, -1, model.spec.width)
    for rank, part in enumerate(_parts(model, shape)):
        np.testing.assert_array_equal(part.array("blk.0.attn_k.weight"), whole[rank // 2])
        assert shard_spec(model.spec, shape.place(rank)).blocks[0].attention.num_kv_heads == 1


def test_a_bias_of_a_sum_is_added_once(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "bert")
    for name in ("blk.0.attn_output.bias", "blk.0.ffn_down.bias"):
        first, second = (part.array(name) for part in _parts(model, ParallelShape(2)))
        np.testing.assert_array_equal(first, model.weights.array(name))
        assert not second.any()


def test_the_vocabulary_need_not_divide(tmp_path: Path) -> None:
    model = _tiny(tmp_path)
    parts = _parts(model, ParallelShape(3))
    assert [part.tensors["output.weight"].shape[0] for part in parts] == [54, 54, 52]
    joined = np.concatenate([part.array("output.weight") for part in parts])
    np.testing.assert_array_equal(joined, model.weights.array("output.weight"))


def test_stages_have_all_layers_between_them(tmp_path: Path) -> None:
    model, shape = _tiny(tmp_path, "gemma3"), ParallelShape(1, 3)
    specs = [shard_spec(model.spec, shape.place(rank)) for rank in range(3)]
    assert sum((spec.blocks for spec in specs), ()) == model.spec.blocks
    assert [spec.head is not None for spec in specs] == [True, False, False]
    assert [spec.output_norm is not None for spec in specs] == [False, False, True]
    last = _parts(model, shape)[2]
    layer = len(model.spec.blocks) - len(specs[2].blocks)
    np.testing.assert_array_equal(last.array("blk.0.attn_q.weight"), model.weights.array(f"blk.{layer}.attn_q.weight"))
    assert last.tensors["token_embd.weight"].num_bytes == 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ParallelShape(3), r"tensor_parallel is 3.*4 attention heads; give one of 1, 2, 4, or"),
        (ParallelShape(1, 3), r"pipeline_parallel is 3, the model has 2 layers; give at most"),
    ],
    ids=["heads", "layers"],
)
def test_what_does_not_divide_is_refused_with_what_does(shape: ParallelShape, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divides(_tiny(tmp_path).spec, shape)


def test_columns_and_kv_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    spec = _tiny(tmp_path).spec
    (first, second) = spec.blocks
    odd = replace(second, feed_forward=replace(second.feed_forward, hidden=98))
    with pytest.raises(ConfigError, match=r"98 columns of the feed-forward; give one of 1, 2,"):
        check_divides(replace(spec, blocks=(first, odd)), ParallelShape(4))
    three = replace(second, mixer=replace(second.attention, num_heads=6, num_kv_heads=3))
    with pytest.raises(ConfigError, match=r"3 KV heads"):
        check_divides(replace(spec, blocks=(three,)), ParallelShape(2))


def test_each_device_is_planned_for_its_own_share(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from kvarn.backends.select import device_share, device_weights

    model, config = _tiny(tmp_path), EngineConfig(backend="torch", tensor_parallel=4)
    weights = device_weights(model.spec, model.weights, config)
    share, held = device_share(model.spec, weights, config)
    whole, own = (sum(info.num_bytes for info in source.tensors.values()) for source in (weights, held))
    assert 0.25 < own / whole < 0.35  # norms are on every device, and two share each KV head
    assert kv_token_bytes(share) == kv_token_bytes(model.spec) / 2


@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_backends_without_ranks_refuse_them(field: str) -> None:
    with pytest.raises(ConfigError, match=rf'{field} is 2, .*auto.*use backend="torch" or "cuda"'):
        EngineConfig(**{field: 2})
    with pytest.raises(ConfigError, match=r"device is cuda:1, .*auto"):
        EngineConfig(device="cuda:1")
    with pytest.raises(ConfigError, match=r"'gpu7'.*cuda:0"):
        EngineConfig(backend="torch", device="gpu7")
