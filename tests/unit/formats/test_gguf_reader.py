"""The GGUF reader on good files, and on every way to be wrong of reference group E."""

from __future__ import annotations

import gc
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import FormatError, ModelError, ModelNotFound, UnsupportedModel
from kvarn.formats.gguf.metadata import NumberArray, StringArray
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from tests import gguf_maker as maker
from tests.gguf_maker import Tensor, array_entry, entry, gguf

BROKEN = maker.broken()


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_every_value_type_is_read_exactly(tmp_path: Path) -> None:
    metadata = GGUFFile(write(tmp_path, maker.tiny())).metadata
    expected = {
        **{maker.UINT8: 255, maker.INT8: -128, maker.UINT16: 65535, maker.INT16: -32768},
        **{maker.UINT32: 2**32 - 1, maker.INT32: -(2**31), maker.UINT64: 2**64 - 1, maker.INT64: -(2**63)},
        **{maker.FLOAT32: 0.5, maker.FLOAT64: 0.1, maker.BOOL: True},
    }
    for type_, value in expected.items():
        assert metadata[f"number.{type_}"] == value
        assert type(metadata[f"number.{type_}"]) is type(value)
        assert metadata[f"numbers.{type_}"] == [value] * 3
    assert metadata["general.architecture"] == "tiny"
    assert metadata["short.strings"] == ["a", "ö", ""]


def test_long_arrays_are_sequences_of_python_values(tmp_path: Path) -> None:
    metadata = GGUFFile(write(tmp_path, maker.tiny())).metadata
    numbers, strings = metadata["long.numbers"], metadata["long.strings"]
    assert isinstance(numbers, NumberArray)
    assert isinstance(strings, StringArray)
    assert numbers == list(range(300))
    assert (numbers[7], type(numbers[7]), numbers[-1], numbers[2:4]) == (7, int, 299, [2, 3])
    assert np.asarray(numbers).sum() == sum(range(300))
    assert list(strings) == [f"token {i}" for i in range(300)]
    assert (strings[0], strings[299], strings[-1], strings[-300]) == ("token 0", "token 299", "token 299", "token 0")
    assert strings[298:] == ["token 298", "token 299"]
    assert strings != ["token 0"]
    assert strings.index("token 17") == 17
    for index in (300, -301):
        with pytest.raises(IndexError):
            strings[index]


def test_shapes_are_in_numpy_order_and_values_in_place(tmp_path: Path) -> None:
    source = GGUFFile(write(tmp_path, maker.tiny()))
    assert {name: (info.type, info.shape) for name, info in source.tensors.items()} == {
        "a.weight": (TensorType.F32, (2, 32)),
        "b.weight": (TensorType.Q8_0, (64,)),
        "c.weight": (TensorType.F16, (3, 1, 2)),
    }
    np.testing.assert_array_equal(source.array("a.weight"), np.arange(64, dtype=np.float32).reshape(2, 32) / 8)
    assert source.raw("b.weight").tobytes() == bytes(range(68))


def test_raw_is_a_read_only_view_that_outlives_the_file(tmp_path: Path) -> None:
    source = GGUFFile(write(tmp_path, maker.tiny()))
    raw = source.raw("b.weight")
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    assert np.shares_memory(raw, source.raw("b.weight"))
    source.close()
    source.close()
    del source
    gc.collect()
    assert raw.tobytes() == bytes(range(68))


def test_a_closed_file_gives_no_tensors_but_keeps_its_metadata(tmp_path: Path) -> None:
    source = GGUFFile(write(tmp_path, maker.tiny()))
    source.close()
    source.release_pages(["a.weight"])
    assert source.metadata["long.strings"][5] == "token 5"
    with pytest.raises(FormatError, match="was closed"):
        source.raw("a.weight")


def test_releasing_pages_leaves_the_bytes_as_they_are(tmp_path: Path) -> None:
    data = bytes(range(256)) * 256
    source = GGUFFile(write(tmp_path, gguf([], [Tensor("big", (len(data) // 4,), data=data), Tensor("next")])))
    raw = source.raw("big")
    source.release_pages(["big", "next"])
    assert raw.tobytes() == data


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_with_metadata_only_is_accepted(tmp_path: Path, version: int) -> None:
    source = open_weights(write(tmp_path, gguf([entry("a", maker.UINT32, 7)], version=version)))
    assert dict(source.metadata) == {"a": 7}
    assert not source.tensors


def test_a_scalar_tensor_is_accepted(tmp_path: Path) -> None:
    source = GGUFFile(write(tmp_path, gguf([], [Tensor("s", (), data=struct.pack("<f", 2.5))])))
    assert source.array("s").shape == ()
    assert source.array("s") == 2.5


def test_gaps_and_any_order_of_tensors_are_accepted(tmp_path: Path) -> None:
    later = Tensor("later", (8,), data=b"\1" * 32, offset=64)
    first = Tensor("first", (8,), data=b"\2" * 64, offset=0)
    source = GGUFFile(write(tmp_path, gguf([], [later, first])))
    assert (source.raw("later")[0], source.raw("first")[0]) == (2, 1)


def test_an_alignment_in_the_metadata_moves_the_data(tmp_path: Path) -> None:
    tensors = [Tensor("a", (1,), data=b"aaaa"), Tensor("b", (1,), data=b"bbbb")]
    data = gguf([entry("general.alignment", maker.UINT32, 1024)], tensors, alignment=1024)
    assert GGUFFile(write(tmp_path, data)).raw("b").tobytes() == b"bbbb"


@pytest.mark.parametrize("count", [3, 300])
def test_tokens_that_are_not_utf8_keep_their_bytes(tmp_path: Path, count: int) -> None:
    tokens = [b"\xff\xc3", b"ok", b"\xed\xa0\x80"] + [b""] * (count - 3)
    metadata = GGUFFile(write(tmp_path, gguf([array_entry("tokens", maker.STRING, tokens)]))).metadata
    assert [token.encode("utf-8", "surrogateescape") for token in metadata["tokens"]] == tokens


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    data, reason = BROKEN[case]
    path = write(tmp_path, data)
    with pytest.raises(ModelError) as caught:
        open_weights(path)
    assert isinstance(caught.value, FormatError | UnsupportedModel)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_format_error_carries_file_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path, gguf(version=9))
    with pytest.raises(FormatError) as caught:
        GGUFFile(path)
    assert (caught.value.file, caught.value.offset) == (str(path), 4)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = maker.tiny()
    end = data.rindex(bytes(12)) + 12  # behind it is only padding
    for part in range(1, 64):
        with pytest.raises(FormatError):
            GGUFFile(write(tmp_path, data[: end * part // 64]))


@pytest.mark.timeout(20)
def test_paths_that_are_no_files_are_refused_without_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the name of a socket may have 107 bytes only
        server.bind("socket")
        for path, error, reason in [
            (fifo, FormatError, "a FIFO"),
            (Path("socket"), FormatError, "a socket"),
            (Path("/dev/null"), FormatError, "a device"),
            (loop, ModelNotFound, "cannot be opened"),
            (tmp_path / "missing.gguf", ModelNotFound, "no such file"),
            (tmp_path / "nul\0byte", ModelNotFound, "cannot be opened"),
            (tmp_path / ("x" * 300), ModelNotFound, "cannot be opened"),
        ]:
            with pytest.raises(error, match=reason):
                open_weights(path)
    with pytest.raises(FormatError, match="a directory"):
        GGUFFile(tmp_path)


def test_a_link_to_a_model_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(write(tmp_path, maker.tiny()))
    assert len(open_weights(link).tensors) == 3


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty"):
        open_weights(write(tmp_path, b""))


def test_a_file_that_shrinks_is_noticed_before_its_bytes_are_touched(tmp_path: Path) -> None:
    path = write(tmp_path, maker.tiny())
    source = GGUFFile(path)
    source.verify_unchanged()
    os.truncate(path, 100)
    with pytest.raises(FormatError, match="shrank"):
        source.raw("a.weight")
    with pytest.raises(FormatError, match="to 100 bytes"):
        source.verify_unchanged()
    assert source.metadata["long.strings"][299] == "token 299"


def test_a_file_rewritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, maker.tiny())
    source = GGUFFile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match="written to"):
        source.verify_unchanged()


def test_a_file_replaced_by_rename_stays_readable(tmp_path: Path) -> None:
    path = write(tmp_path, maker.tiny())
    source = GGUFFile(path)
    other = tmp_path / "other"
    other.write_bytes(b"")
    other.rename(path)
    source.verify_unchanged()
    assert source.raw("b.weight").tobytes() == bytes(range(68))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files through /proc")
def test_no_file_stays_open_after_a_failure_or_close(tmp_path: Path) -> None:
    good, bad = write(tmp_path, maker.tiny()), tmp_path / "bad.gguf"
    bad.write_bytes(maker.tiny()[:500])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        GGUFFile(good).close()
        with pytest.raises(FormatError):
            GGUFFile(bad)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
