"""A file of measured types beside a mix of the same bytes and imatrix: a tiny model, and in the long form SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvarn
from kvarn.evaluation.evaluate import evaluate_all
from tests.conftest import Record
from tests.float_model import write_float_model, write_text
from tests.float_source import float_source

pytestmark = pytest.mark.model


def texts(folder: Path, *, is_long: bool) -> tuple[Path, Path]:
    """Calibration and evaluation text: random words, or Python's own manual by halves."""
    if not is_long:
        return write_text(folder / "cal.txt", seed=1, num_words=2000), write_text(folder / "held-out.txt", seed=2)
    from pydoc_data.topics import topics

    for name, first in (("cal.txt", 0), ("held-out.txt", 1)):
        (folder / name).write_text("\n".join(topics[page] for page in sorted(topics)[first::2]), encoding="utf-8")
    return folder / "cal.txt", folder / "held-out.txt"


def test_a_size_beats_a_mix_of_its_bytes(is_long: bool, record: Record, tmp_path: Path) -> None:
    source = float_source("smollm2") if is_long else write_float_model(tmp_path / "source.gguf", width=64, hidden=256)
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
