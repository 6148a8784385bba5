"""The writer: read back by our reader and by the gguf package, and the gguf package's files by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvarn.errors import FormatError
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorType
from tests import gguf_maker as maker

KINDS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")
METADATA: dict[str, Any] = {
    "general.architecture": "tiny",
    "bool": True,
    "small": 7,
    "negative": -7,
    "big": 2**63,
    "float": 0.25,
    **{f"np.{kind}": np.dtype(kind).type(3) for kind in KINDS},
    **{f"array.{kind}": np.arange(5, dtype=kind) for kind in KINDS},
    "array.bool": np.array([True, False]),
    "ints": [1, -2, 3],
    "floats": [0.5, 1.5],
    "bools": [True, False],
    "strings": ["a", "ö", "", "😀"],
    "tokens": [f"t{i}" for i in range(500)],
    "scores": [float(i) for i in range(500)],
}
RNG = np.random.default_rng(3)
VALUES = RNG.standard_normal((6, 512)).astype(np.float32)


def all_types() -> dict[str, Stored]:
    return {f"{type_.name}.weight": Stored.quantized(VALUES, type_) for type_ in TensorType}


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def test_our_reader_gets_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert write_gguf(path, METADATA, all_types()) == [path]
    source = GGUFFile(path)
    assert {key: plain(value) for key, value in METADATA.items()} == dict(source.metadata)
    for type_ in TensorType:
        assert source.tensors[f"{type_.name}.weight"].shape == VALUES.shape
        np.testing.assert_array_equal(source.raw(f"{type_.name}.weight"), quantize(VALUES, type_))


def test_the_gguf_package_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, all_types())
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == plain(value), key
        if key.startswith(("np.", "array.")):
            dtype = np.asarray(value).dtype
            assert reader.fields[key].parts[reader.fields[key].data[0]].dtype == dtype, key
    assert [tensor.name for tensor in reader.tensors] == list(all_types())
    for tensor in reader.tensors:
        assert list(tensor.shape) == [512, 6]
        stored = all_types()[tensor.name]
        np.testing.assert_array_equal(np.asarray(tensor.data).view(np.uint8).reshape(-1), stored.data)


def test_our_reader_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    writer.add_custom_alignment(64)
    writer.add_uint8("u8", 1)
    writer.add_int16("i16", -2)
    writer.add_uint64("u64", 2**60)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_token_list([f"<{i}>" for i in range(700)])
    writer.add_token_scores([i / 4 for i in range(700)])
    writer.add_array("layers", [1, 2, 3])
    writer.add_tensor("f32", VALUES)
    writer.add_tensor("f16", VALUES.astype(np.float16))
    packed = gguf.quants.quantize(VALUES, gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("q5_1", packed, raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = GGUFFile(path)
    metadata = source.metadata
    assert (metadata["u8"], metadata["i16"], metadata["u64"], metadata["f64"]) == (1, -2, 2**60, 0.1)
    assert (metadata["yes"], metadata["text"], metadata["layers"]) == (True, "grüße", [1, 2, 3])
    assert metadata["tokenizer.ggml.tokens"] == [f"<{i}>" for i in range(700)]
    assert metadata["tokenizer.ggml.scores"] == [i / 4 for i in range(700)]
    np.testing.assert_array_equal(source.array("f32"), VALUES)
    np.testing.assert_array_equal(source.array("f16"), VALUES.astype(np.float16))
    np.testing.assert_array_equal(source.array("q5_1"), dequantize(packed.reshape(-1), TensorType.Q5_1, VALUES.shape))


def test_metadata_read_can_be_written_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes(maker.gguf([maker.array_entry("tokens", maker.STRING, [b"\xff", "ü"] * 200)]))
    metadata = GGUFFile(first).metadata
    write_gguf(second, metadata, {})
    assert second.read_bytes().startswith(first.read_bytes())
    assert GGUFFile(second).metadata == metadata


def test_float_arrays_need_no_wrapping(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {"a": VALUES, "b": VALUES.T.astype(np.float16)})
    source = GGUFFile(path)
    np.testing.assert_array_equal(source.array("a"), VALUES)
    np.testing.assert_array_equal(source.array("b"), VALUES.T.astype(np.float16))


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_the_alignment_of_the_metadata_is_kept(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {"general.alignment": alignment}, {"a": VALUES[:1, :3], "b": VALUES})
    np.testing.assert_array_equal(GGUFFile(path).array("b"), VALUES)
    assert gguf.GGUFReader(path).alignment == alignment


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({"bad": None}, {}),
        ({"bad": [1, "a"]}, {}),
        ({"bad": [True, 2]}, {}),
        ({"bad": 2**64}, {}),
        ({"bad": np.complex64(1)}, {}),
        ({"bad": [[1], [2]]}, {}),
        ({}, {"bad": np.zeros(3, dtype=np.int64)}),
        ({}, {"bad": Stored(TensorType.Q8_0, (32,), np.zeros(33, dtype=np.uint8))}),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, metadata: Any, tensors: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    with pytest.raises(FormatError, match="bad"):
        write_gguf(path, metadata, tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == b"old"
