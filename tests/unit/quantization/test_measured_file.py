"""What a size measured is kept: the next size measures nothing, a stopped run goes on, other sources are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvarn
from kvarn.errors import ConfigError, FormatError
from tests.float_model import write_float_model, write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "model.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt", seed=1)


@pytest.fixture(scope="module")
def imatrix(source: Path, text: Path) -> Path:
    path = source.parent / "imatrix"
    kvarn.collect_imatrix(source, path, text=text, options=kvarn.ImatrixOptions(chunks=4, context=64))
    return path


def test_the_next_size_measures_nothing_and_is_the_same(
    source: Path, text: Path, imatrix: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "measured.json"
    with_file = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)
    kvarn.quantize(source, kvarn.SizeTarget(bits_per_weight=5.5), tmp_path / "first.gguf", options=with_file)
    written, target = kept.stat().st_mtime_ns, kvarn.SizeTarget(bits_per_weight=6.5)
    plain = kvarn.QuantizeOptions(text=text, imatrix=imatrix)
    kvarn.quantize(source, target, tmp_path / "plain.gguf", options=plain)
    kvarn.quantize(source, target, tmp_path / "second.gguf", options=with_file)
    assert kept.stat().st_mtime_ns == written  # every tensor that is measured is added
    assert (tmp_path / "second.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert (tmp_path / "first.gguf").stat().st_size < (tmp_path / "second.gguf").stat().st_size


def test_a_stopped_measurement_goes_on(source: Path, text: Path, imatrix: Path, tmp_path: Path) -> None:
    kept, target = tmp_path / "measured.json", kvarn.SizeTarget(bits_per_weight=6)
    options = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)

    def stop(done: int, _total: int | None, label: str) -> None:
        if label == "measuring" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvarn.quantize(source, target, tmp_path / "out.gguf", options=options, progress=stop)
    before = json.loads(kept.read_text())["tensors"]
    assert len(before) == 5
    kvarn.quantize(source, target, tmp_path / "out.gguf", options=options)
    after = json.loads(kept.read_text())["tensors"]
    assert {name: after[name] for name in before} == before
    assert len(after) == 8 * 7 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.json", "out.gguf"]


@pytest.mark.parametrize("other", ["weights", "text", "imatrix"])
def test_figures_of_anything_else_are_refused(
    source: Path, text: Path, imatrix: Path, tmp_path: Path, other: str
) -> None:
    kept, target = tmp_path / "measured.json", kvarn.SizeTarget(bits_per_weight=6)
    options = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)
    kvarn.quantize(source, target, tmp_path / "out.gguf", options=options)
    if other == "weights":
        source = write_float_model(tmp_path / "other.gguf", width=64, hidden=96, seed=9)
    if other == "text":
        text = write_text(tmp_path / "other.txt", seed=5)
    if other == "imatrix":
        imatrix = tmp_path / "other.imatrix"
        few = kvarn.ImatrixOptions(chunks=2, context=64)
        kvarn.collect_imatrix(source, imatrix, text=text, options=few)
    options = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)
    with pytest.raises(ConfigError, match="another source, text or imatrix"):
        kvarn.quantize(source, target, tmp_path / "other-out.gguf", options=options)


def test_a_file_that_is_none_and_a_type_are_refused(source: Path, text: Path, imatrix: Path, tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    kept.write_text("[]")
    options = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)
    with pytest.raises(FormatError, match=r"measured\.json"):
        kvarn.quantize(source, kvarn.SizeTarget(bits_per_weight=6), tmp_path / "out.gguf", options=options)
    with pytest.raises(ConfigError, match="--bytes or --bpw"):
        kvarn.quantize(source, "Q4_0", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(measured=kept))


def test_a_figure_that_has_changed_on_the_disk_is_told(source: Path, text: Path, imatrix: Path, tmp_path: Path) -> None:
    kept, target = tmp_path / "measured.json", kvarn.SizeTarget(bits_per_weight=6)
    options = kvarn.QuantizeOptions(text=text, imatrix=imatrix, measured=kept)
    kvarn.quantize(source, target, tmp_path / "out.gguf", options=options)
    document = json.loads(kept.read_text())
    document["tensors"]["blk.0.attn_q.weight"]["types"][0][1] += 1
    kept.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="not those that were written"):
        kvarn.quantize(source, target, tmp_path / "second.gguf", options=options)
