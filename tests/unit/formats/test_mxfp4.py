"""MXFP4 tensors of GGUF files have the values that the `gguf` package gives them, and are Q8_0 here."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvarn.errors import FormatError
from kvarn.formats.open import open_weights
from kvarn.formats.stored_types import mxfp4
from kvarn.formats.weights import TensorType

MXFP4 = gguf.GGMLQuantizationType.MXFP4
BLOCK_BYTES = 17


def _file(folder: Path, **tensors: npt.NDArray[np.uint8]) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "gpt-oss")
    for name, blocks in tensors.items():
        writer.add_tensor(name, blocks, raw_dtype=MXFP4)
    writer.add_tensor("plain", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_code_and_scale_is_read_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 4, 5 * BLOCK_BYTES), np.uint8)
    blocks[..., ::BLOCK_BYTES] = rng.integers(128 - 24, 128 + 16, (3, 4, 5))
    source = open_weights(_file(tmp_path, experts=blocks))
    info = source.tensors["experts"]
    assert (info.type, info.shape) == (TensorType.Q8_0, (3, 4, 160))
    np.testing.assert_array_equal(source.array("experts"), gguf.dequantize(blocks, MXFP4))
    np.testing.assert_array_equal(source.array("plain"), [0, 1, 2])
    assert source.raw("experts").size == info.num_bytes


def test_a_block_of_zeros_may_have_any_scale() -> None:
    block = np.zeros(BLOCK_BYTES, np.uint8)
    assert not mxfp4.as_q8_0(mxfp4.read(block[None]))[:, 2:].any()


@pytest.mark.parametrize("exponent", [103, 144])
def test_a_scale_that_q8_0_cannot_hold_is_refused(exponent: int) -> None:
    block = np.full(BLOCK_BYTES, exponent, np.uint8)
    with pytest.raises(FormatError, match=r"2\^-24 to 2\^15"):
        mxfp4.as_q8_0(mxfp4.read(block[None]))


def test_a_file_that_ends_in_a_tensor_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, experts=np.full((2, 4 * BLOCK_BYTES), 120, np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 64])
    with pytest.raises(FormatError):
        open_weights(path)
