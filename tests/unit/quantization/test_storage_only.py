"""IQ4_XS and MXFP4: read back by the gguf package, beside llama.cpp's quantiser where it is installed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import kvarn
from kvarn.backends.native import _native
from kvarn.errors import ConfigError, FormatError
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import write_gguf
from kvarn.quantization.blocks import encode
from kvarn.quantization.storage_only.types import StorageOnlyType
from tests.float_model import write_float_model, write_text

Float32 = npt.NDArray[np.float32]
KINDS = {type: gguf.GGMLQuantizationType[type.name] for type in StorageOnlyType}


def matrix(rows: int = 24, columns: int = 512) -> Float32:
    rng = np.random.default_rng(5)
    return (0.02 * rng.standard_normal((rows, columns)) * rng.exponential(1, (rows, columns))).astype(np.float32)


def decoded(data: npt.NDArray[np.uint8], type: StorageOnlyType, rows: int) -> Float32:
    return np.asarray(gguf.dequantize(data.reshape(rows, -1), KINDS[type]), np.float32)


def encoded(values: Float32, type: StorageOnlyType, importance: Float32 | None = None) -> npt.NDArray[np.uint8]:
    return encode(values, type, importance, _native.ThreadTeam(1))


@pytest.mark.parametrize("type", StorageOnlyType)
def test_values_come_back_and_importance_lowers_the_error_it_weighs(type: StorageOnlyType) -> None:
    x = matrix()
    importance = (np.random.default_rng(6).exponential(1, x.shape[1]) ** 2 + 0.01).astype(np.float32)
    plain, weighted = (decoded(encoded(x, type, weights), type, len(x)) for weights in (None, importance))
    assert np.linalg.norm(plain - x) < 0.16 * np.linalg.norm(x)
    errors = [float((importance * (values - x) ** 2).sum()) for values in (plain, weighted)]
    assert errors[1] < errors[0]


def test_mxfp4_is_what_the_gguf_package_writes() -> None:
    x = matrix()
    theirs = gguf.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    assert encoded(x, StorageOnlyType.MXFP4).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("type", StorageOnlyType)
def test_zeros_and_single_values_are_exact(type: StorageOnlyType) -> None:
    x = np.zeros((2, 512), np.float32)
    x[1, 300] = -4.0
    assert np.abs(decoded(encoded(x, type), type, 2) - x).max() <= 4 / 127 + 1e-4  # the level nearest to 0 is 1
    assert not decoded(encoded(x, type), type, 2)[0].any()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "model.gguf", width=256, hidden=512)


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_the_mixes_are_those_of_llama_cpp(source: Path, tmp_path: Path) -> None:
    for mix in ("IQ4_XS", "MXFP4", "MXFP4_MOE"):
        kvarn.quantize(source, mix, tmp_path / mix)
    found = {mix: types(tmp_path / mix) for mix in ("IQ4_XS", "MXFP4", "MXFP4_MOE")}
    assert found["IQ4_XS"]["blk.0.ffn_down.weight"] == "Q5_K"
    assert found["IQ4_XS"]["blk.5.ffn_down.weight"] == "IQ4_XS"
    assert found["IQ4_XS"]["token_embd.weight"] == "Q6_K"
    assert found["MXFP4"]["blk.5.ffn_down.weight"] == "MXFP4"
    assert set(found["MXFP4_MOE"].values()) == {"Q8_0", "F32"}


def test_a_file_of_mxfp4_answers_and_is_near_its_source(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "MXFP4", tmp_path / "out.gguf")
    before, after = GGUFFile(source), GGUFFile(tmp_path / "out.gguf")
    for name in ("blk.0.attn_q.weight", "blk.7.ffn_down.weight"):
        values = before.array(name)
        assert np.linalg.norm(after.array(name) - values) < 0.16 * np.linalg.norm(values)
    with kvarn.LLM(tmp_path / "out.gguf", context=256) as llm:
        params = kvarn.SamplingParams(max_tokens=4, temperature=0)
        assert llm.generate("to be or", params).usage.completion_tokens >= 1


def test_rows_that_do_not_fit_fall_back(tmp_path: Path) -> None:
    narrow = write_float_model(tmp_path / "narrow.gguf", width=64, hidden=96)
    kvarn.quantize(narrow, "IQ4_XS", tmp_path / "out.gguf")
    assert types(tmp_path / "out.gguf")["blk.5.attn_q.weight"] == "IQ4_NL"


def test_nan_and_feedback_are_refused(source: Path, tmp_path: Path) -> None:
    whole = GGUFFile(source)
    arrays = {name: whole.array(name).copy() for name in whole.tensors}
    arrays["blk.3.ffn_up.weight"][5, 5] = np.inf
    write_gguf(tmp_path / "broken.gguf", whole.stored_metadata(), arrays)
    with pytest.raises(FormatError, match=r"blk\.3\.ffn_up\.weight has NaN"):
        kvarn.quantize(tmp_path / "broken.gguf", "IQ4_XS", tmp_path / "out.gguf")
    options = kvarn.QuantizeOptions(method="gptq", text=write_text(tmp_path / "text.txt"))
    with pytest.raises(ConfigError, match="IQ4_XS"):
        kvarn.quantize(source, "IQ4_XS", tmp_path / "out.gguf", options=options)
    assert not (tmp_path / "out.gguf").exists()
