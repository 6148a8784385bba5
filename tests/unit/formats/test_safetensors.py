"""Safetensors folders: equal to the safetensors package on good ones, one clear sentence on bad ones."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvarn.errors import FormatError, ModelError, ModelNotFound, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.formats.strict_json import parse_object
from kvarn.formats.weights import TensorType

CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def folder(path: Path, *shards: tuple[str, bytes], config: Any = CONFIG) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    for name, data in shards:
        (path / name).write_bytes(data)
    return path


def file_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def info(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_folder_written_by_the_safetensors_package_is_read(tmp_path: Path) -> None:
    tensors = {"w": VALUES, "h": VALUES.astype(np.float16), "s": np.array(3, dtype=np.float32)}
    save_file(tensors, folder(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    source = open_weights(tmp_path)
    assert source.metadata == {"hf": CONFIG, "hf_folder": str(tmp_path)}
    assert {name: (item.type, item.shape) for name, item in source.tensors.items()} == {
        "w": (TensorType.F32, (3, 4)),
        "h": (TensorType.F16, (3, 4)),
        "s": (TensorType.F32, ()),
    }
    for name, values in tensors.items():
        np.testing.assert_array_equal(source.array(name), values)
    raw = source.raw("w")
    assert not raw.flags.writeable
    source.release_pages(["w"])
    source.close()
    np.testing.assert_array_equal(raw.view(np.float32).reshape(3, 4), VALUES)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    data = file_bytes({"w": info("BF16", [2], [0, 4])}, struct.pack("<HH", 0x3F80, 0xC000))
    assert open_weights(folder(tmp_path, ("model.safetensors", data))).array("w").tolist() == [1.0, -2.0]


def test_shards_are_one_source(tmp_path: Path) -> None:
    save_file({"a": VALUES}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": VALUES + 1}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_weights(folder(tmp_path))
    np.testing.assert_array_equal(source.array("b"), VALUES + 1)
    assert sorted(source.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "missing.safetensors"}, "shard missing.safetensors is missing"),
        ({"b": "model.safetensors"}, "tensor 'b' is not here"),
        ({"a": "../model.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/passwd"}, "not a file of this folder"),
        ({"a": 7}, "not a file of this folder"),
        ({"a": "model.safetensors", "b": "copy.safetensors"}, "also in another shard"),
        ({}, "weight_map is missing or empty"),
        (["a"], "weight_map is missing or empty"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, reason: str) -> None:
    save_file({"a": VALUES}, folder(tmp_path) / "model.safetensors")
    save_file({"a": VALUES, "b": VALUES}, tmp_path / "copy.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=reason):
        open_weights(tmp_path)


def test_integer_buffers_are_left_out(tmp_path: Path) -> None:
    save_file({"embeddings.position_ids": np.arange(4), "w": VALUES}, folder(tmp_path) / "model.safetensors")
    assert list(open_weights(tmp_path).tensors) == ["w"]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float64, np.bool_])
def test_other_types_are_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    save_file({"layer.weight": np.zeros(4, dtype=dtype)}, folder(tmp_path) / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor 'layer\.weight' is"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\1\2\3", "the header claims"),
        (file_bytes({}, length=2**63), "the header claims"),
        (file_bytes({}, length=100), "the header claims"),
        (file_bytes(b"not json"), "not JSON"),
        (file_bytes(b"\xff\xfe{}"), "not JSON"),
        (file_bytes(b"[]"), "not an object"),
        (file_bytes(b"[" * 50_000), "nested too deeply"),
        (file_bytes(b'{"a": NaN}'), "not JSON"),
        (file_bytes(b'{"a": ' + b"9" * 10_000 + b"}"), "not JSON"),
        (file_bytes(b'{"a": {}, "a": {}}'), "occurs twice"),
        (file_bytes({"a": 1}), "needs exactly"),
        (file_bytes({"a": info() | {"extra": 1}}, bytes(8)), "needs exactly"),
        (file_bytes({"a": info(offsets=[0, 2**63])}, bytes(8)), "not in the file"),
        (file_bytes({"a": info(offsets=[-8, 0])}, bytes(8)), "not in the file"),
        (file_bytes({"a": info(offsets=[8, 0])}, bytes(8)), "not in the file"),
        (file_bytes({"a": info(offsets=[0, True])}, bytes(8)), "not in the file"),
        (file_bytes({"a": info(offsets=[0.0, 8.0])}, bytes(8)), "not in the file"),
        (file_bytes({"a": info(shape=[3])}, bytes(8)), "not those of F32"),
        (file_bytes({"a": info(shape=[-2])}, bytes(8)), "has the shape"),
        (file_bytes({"a": info(shape=[2**32, 2**32])}, bytes(8)), "has the shape"),
        (file_bytes({"a": info(shape="2")}, bytes(8)), "has the shape"),
        (file_bytes({"a": info(shape=[1] * 9)}, bytes(8)), "has the shape"),
        (file_bytes({"a": info(dtype="F3")}, bytes(8)), "unknown type 'F3'"),
        (file_bytes({"a": info(shape=[0], offsets=[0, 0])}), "at least one value"),
        (file_bytes({"a": info(offsets=[8, 16])}, bytes(16)), "the one before ends at 0"),
        (file_bytes({"a": info(), "b": info(offsets=[4, 12])}, bytes(12)), "the one before ends at 8"),
        (file_bytes({"a": info()}, bytes(9)), "the tensors end at 8"),
        (file_bytes({"a": info()}, bytes(7)), "the tensors end at 8"),
    ],
)
def test_a_broken_file_is_refused_with_its_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        open_weights(folder(tmp_path, ("model.safetensors", data)))
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    save_file({"a": VALUES, "b": VALUES}, path)
    data = path.read_bytes()
    for part in range(64):
        path.write_bytes(data[: len(data) * part // 64])
        with pytest.raises(FormatError):
            open_weights(tmp_path)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    data = b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "pwned") + b"'\ntR."
    with pytest.raises(ModelNotFound, match=r"pickle files such as pytorch_model.bin are not read"):
        open_weights(folder(tmp_path, ("pytorch_model.bin", data)))
    with pytest.raises(FormatError, match="pickle files are not read"):
        open_weights(tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "pwned").exists()


def test_other_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json; give a GGUF file or"):
        open_weights(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"give the path of a file in it, such as m.gguf"):
        open_weights(tmp_path)
    with pytest.raises(FormatError, match="give the folder"):
        open_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize("config", ["[]", "{", '{"a": 1, "a": 2}', ""])
def test_a_broken_config_is_refused(tmp_path: Path, config: str) -> None:
    save_file({"a": VALUES}, folder(tmp_path) / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(FormatError, match=r"config.json"):
        open_weights(tmp_path)


def test_a_weight_file_that_is_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(folder(tmp_path) / "model.safetensors")
    with pytest.raises(FormatError, match="a FIFO"):
        open_weights(tmp_path)


@pytest.mark.parametrize("item", ["{},", "[],", '{"":0},', "0.5,", '"ab",', "123456,"])
def test_hostile_json_stays_within_the_memory_bound(item: str) -> None:
    data = b'{"a":[' + (item.encode() * (4 << 20))[: (4 << 20) - 64].rsplit(b",", 1)[0] + b"]}"
    tracemalloc.start()
    try:
        with contextlib.suppress(FormatError):
            parse_object(data, "header")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * len(data) + (64 << 20)
