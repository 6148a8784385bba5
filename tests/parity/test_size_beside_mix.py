"""A file of measured types beside a mix of the same bytes and imatrix: a tiny model, and in the long form SmolLM2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvarn
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.weights import TensorType
from tests.assets import smollm2
from tests.conftest import Record
from tests.float_model import write_float_model, write_text

pytestmark = pytest.mark.model


def off_its_grid(source: Path, path: Path) -> Path:
    """A quantised model as F16, every value moved by up to half a step of its block: no type fits it by descent."""
    opened, rng = GGUFFile(source), np.random.default_rng(0)
    arrays = {name: _moved(opened.array(name), info.type, rng) for name, info in opened.tensors.items()}
    write_gguf(path, {**opened.stored_metadata(), "general.file_type": 1}, arrays)
    return path


def _moved(values: npt.NDArray[np.float32], type: TensorType, rng: np.random.Generator) -> npt.NDArray[np.floating]:
    if values.ndim < 2 or type.block_values == 1:
        return values
    blocks = values.reshape(-1, 32)
    gaps = np.diff(np.sort(blocks, axis=1), axis=1)
    gaps[gaps < 1e-3 * np.abs(blocks).max(axis=1, keepdims=True)] = np.inf
    step = gaps.min(axis=1, keepdims=True)
    step[~np.isfinite(step)] = 0
    noise = rng.random(blocks.shape, np.float32) - 0.5
    return (blocks + step * noise).reshape(values.shape).astype(np.float16)


def texts(folder: Path, *, is_long: bool) -> tuple[Path, Path]:
    """Calibration and evaluation text: random words, or Python's own manual by halves."""
    if not is_long:
        return write_text(folder / "cal.txt", seed=1, num_words=2000), write_text(folder / "held-out.txt", seed=2)
    from pydoc_data.topics import topics

    for name, first in (("cal.txt", 0), ("held-out.txt", 1)):
        (folder / name).write_text("\n".join(topics[page] for page in sorted(topics)[first::2]), encoding="utf-8")
    return folder / "cal.txt", folder / "held-out.txt"


def test_a_size_beats_a_mix_of_its_bytes(is_long: bool, record: Record, tmp_path: Path) -> None:
    if is_long:
        source = off_its_grid(smollm2(), tmp_path / "source.gguf")
    else:
        source = write_float_model(tmp_path / "source.gguf", width=64, hidden=256)
    calibration, held_out = texts(tmp_path, is_long=is_long)
    matrix, mix, sized = (tmp_path / name for name in ("imatrix", "mix.gguf", "sized.gguf"))
    kvarn.collect_imatrix(source, matrix, text=calibration, options=kvarn.ImatrixOptions(chunks=24, context=256))
    kvarn.quantize(source, "Q4_K_M", mix, options=kvarn.QuantizeOptions(imatrix=matrix))
    target = kvarn.SizeTarget(num_bytes=mix.stat().st_size)
    kvarn.quantize(source, target, sized, options=kvarn.QuantizeOptions(imatrix=matrix, text=calibration))
    assert sized.stat().st_size <= mix.stat().st_size
    options = kvarn.EvaluationOptions(chunks=8, context=256)
    _, theirs, ours = evaluate_all([mix, sized], text=held_out, against=source, options=options)
    assert ours.divergence is not None
    assert theirs.divergence is not None
    figures = {"kl_mean": ours.divergence.kl_mean, "kl_mean_mix": theirs.divergence.kl_mean}
    record("quantize-size", figures | {"kl_999": ours.divergence.kl_999, "kl_999_mix": theirs.divergence.kl_999})
    assert ours.divergence.kl_mean <= 0.8 * theirs.divergence.kl_mean
    assert ours.divergence.kl_999 <= theirs.divergence.kl_999
