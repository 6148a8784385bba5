"""GPTQ's error feedback: the grids of stored blocks, the rounding against its definition, moments, whole files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvarn
from kvarn.errors import InvalidParameter
from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.stored_grids import grid_of, has_grid, with_quants
from kvarn.formats.weights import TensorType
from kvarn.quantization.gptq import DAMPING, ErrorFeedback
from kvarn.quantization.imatrix import read_imatrix
from kvarn.quantization.moments import CONTEXT, MomentCollector
from tests.float_model import LAYERS, write_float_model, write_text

Float32 = npt.NDArray[np.float32]
GRIDS = [type for type in TensorType if has_grid(type)]


def matrix(rows: int, columns: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def correlated(columns: int, rank: int = 12) -> Float32:
    """Moments of inputs that mostly lie in a few directions."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2048, rank)) @ rng.standard_normal((rank, columns)) + rng.standard_normal((2048, columns))
    return (x.T @ x / len(x)).astype(np.float32)


def nearest(values: Float32, stored: npt.NDArray[np.uint8], type: TensorType) -> npt.NDArray[np.uint8]:
    grid = grid_of(stored.reshape(-1, type.block_bytes), type)
    parts = values.reshape(grid.scale.shape)
    errors = np.abs(grid.scale[..., None] * grid.levels + grid.low[..., None] - parts[..., None])
    return errors.argmin(axis=-1).astype(np.uint8)


def test_every_type_that_rounds_coarsely_has_a_grid() -> None:
    assert {type.name for type in TensorType} - {type.name for type in GRIDS} == {"F32", "F16", "BF16", "Q8_0"}


@pytest.mark.parametrize("type", GRIDS)
def test_grid_and_quants_are_all_that_a_block_holds(type: TensorType) -> None:
    stored = quantize(matrix(6, 512), type).reshape(-1, type.block_bytes)
    values = dequantize(stored.reshape(-1), type, (len(stored), type.block_values))
    grid, quants = grid_of(stored, type), nearest(values, stored, type)
    assert np.array_equal((grid.scale * grid.levels[quants] + grid.low).astype(np.float32), values)
    other = np.random.default_rng(1).integers(0, len(grid.levels), quants.shape).astype(np.uint8)
    changed = with_quants(stored, type, other)
    expected = grid.scale * grid.levels[other] + grid.low
    assert np.array_equal(dequantize(changed.reshape(-1), type, values.shape), expected.astype(np.float32))
    back = dequantize(with_quants(changed, type, quants).reshape(-1), type, values.shape)
    assert np.array_equal(back, values)


@pytest.mark.parametrize("type", GRIDS)
def test_inputs_without_correlation_leave_the_nearest_quants(type: TensorType) -> None:
    values = matrix(5, 512)
    stored = quantize(values, type)
    rounded = ErrorFeedback(np.eye(512, dtype=np.float32)).rounded(values, stored, type)
    expected = with_quants(stored.reshape(-1, type.block_bytes), type, nearest(values, stored, type))
    assert np.array_equal(dequantize(rounded, type, values.shape), dequantize(expected.reshape(-1), type, values.shape))


@pytest.mark.parametrize("type", GRIDS)
def test_correlated_inputs_see_less_error(type: TensorType) -> None:
    values, moments = matrix(64, 512), correlated(512)
    stored = quantize(values, type)

    def error(raw: npt.NDArray[np.uint8]) -> float:
        change = dequantize(raw, type, values.shape) - values
        return float(((change @ moments) * change).sum())

    assert error(ErrorFeedback(moments).rounded(values, stored, type)) < 0.5 * error(stored)


def test_the_rounding_is_that_of_the_definition() -> None:
    """Optimal brain quantisation, with the inverse of what is left updated after each column."""
    type, values, moments = TensorType.Q4_0, matrix(4, 64), correlated(64)
    stored = quantize(values, type)
    grid = grid_of(stored.reshape(-1, type.block_bytes), type)
    scale = grid.scale.reshape(values.shape).astype(np.float64)
    damped = moments.astype(np.float64) + DAMPING * moments.diagonal().mean() * np.eye(64)
    inverse, left, w = np.linalg.inv(damped), np.ones(64, bool), values.astype(np.float64)
    for j in np.argsort(-moments.diagonal(), kind="stable"):
        rounded = scale[:, j] * np.clip(np.rint(w[:, j] / scale[:, j]), -8, 7)
        error = (w[:, j] - rounded) / inverse[j, j]
        left[j] = False
        w[:, left] -= np.outer(error, inverse[j, left])
        w[:, j] = rounded
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    found = dequantize(ErrorFeedback(moments).rounded(values, stored, type), type, values.shape)
    assert np.mean(np.abs(found - w) < 1e-6) > 0.99, "ties aside, where float32 and float64 part"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "model.gguf", width=64, hidden=256)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt", seed=1, num_words=2000)


def test_the_diagonal_of_the_moments_is_the_importance(source: Path, text: Path, imatrix: Path) -> None:
    entries = read_imatrix(imatrix).entries
    with closing(MomentCollector(source, read_text(text), 2)) as collector:
        inputs = [one for band in collector.bands() for one in band]
        found = collector.collect(inputs, None)
    assert len(inputs) == 4 * LAYERS
    for one, moments in found.items():
        name = next(name for name in one.matrices if name in entries)
        np.testing.assert_allclose(moments.diagonal(), entries[name].importance, rtol=1e-4)
        np.testing.assert_allclose(moments, moments.T, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def imatrix(source: Path, text: Path) -> Path:
    kvarn.collect_imatrix(source, text.with_name("imatrix"), text=text, options=kvarn.ImatrixOptions(context=CONTEXT))
    return text.with_name("imatrix")


def quantized(source: Path, mix: str, output: Path, options: kvarn.QuantizeOptions) -> Path:
    kvarn.quantize(source, mix, output, options=options)
    return output


@pytest.mark.parametrize("mix", ["IQ4_NL", "Q4_K_M", "Q3_K_S"])
def test_a_file_with_feedback_diverges_less(source: Path, text: Path, imatrix: Path, tmp_path: Path, mix: str) -> None:
    held_out = write_text(tmp_path / "held-out.txt", seed=2)
    feedback = kvarn.QuantizeOptions(imatrix=imatrix, method="gptq", text=text)
    files = [
        quantized(source, mix, tmp_path / "plain", kvarn.QuantizeOptions(imatrix=imatrix)),
        quantized(source, mix, tmp_path / "feedback", feedback),
    ]
    found = []
    for file in files:
        options = kvarn.EvaluationOptions(chunks=4, context=128)
        report = kvarn.evaluate(file, text=held_out, against=source, options=options)
        assert report.divergence is not None
        found.append(report.divergence.kl_mean)
    assert found[1] < 0.85 * found[0]
    infos = [{name: info.type for name, info in GGUFFile(file).tensors.items()} for file in files]
    assert infos[0] == infos[1]


def test_feedback_gives_the_same_bytes_twice_and_remembers_its_text(source: Path, text: Path, tmp_path: Path) -> None:
    options = kvarn.QuantizeOptions(method="gptq", text=text)
    first, second = (quantized(source, "Q4_1", tmp_path / name, options) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    with pytest.raises(InvalidParameter, match="calibrated with"):
        kvarn.evaluate(first, text=text, against=source)


def test_a_text_too_short_for_moments_is_refused(source: Path, tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", num_words=200)
    with pytest.raises(InvalidParameter, match=r"short\.txt gives \d chunks"):
        kvarn.quantize(source, "Q4_0", tmp_path / "out", options=kvarn.QuantizeOptions(method="gptq", text=short))
    assert not (tmp_path / "out").exists()
