"""Parts that do nothing go without a trace; what stays is the source's own; nothing to go is a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvarn
from kvarn.errors import ConfigError
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.pruning.cut import Cut, LayerCut, PrunedWeights, whole
from kvarn.pruning.shapes import cut_hidden
from tests.float_model import LAYERS, write_float_model, write_text
from tests.unit.pruning.models import HEAD_DIM, HEADS, HIDDEN, WIDTH, Float32, logits_of, write_changed

GONE = 32  # channels


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt")


def zero_channels(name: str, values: Float32) -> Float32:
    """Other channels in each layer: every sixth, from the layer's number on."""
    if name.endswith("ffn_down.weight"):
        values[:, int(name.split(".")[1]) % 6 :: 6] = 0
    return values


def zero_head(name: str, values: Float32) -> Float32:
    if name.endswith("attn_output.weight"):
        head = int(name.split(".")[1]) % HEADS
        values[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
    return values


def zero_layers(name: str, values: Float32) -> Float32:
    if name in {f"blk.{layer}.{kind}.weight" for layer in (2, 5) for kind in ("attn_output", "ffn_down")}:
        values[:] = 0
    return values


@pytest.mark.parametrize(
    ("change", "target", "shape"),
    [
        (zero_channels, kvarn.PruneTarget(ffn=GONE / HIDDEN), (LAYERS, HIDDEN - GONE, HEADS)),
        (zero_head, kvarn.PruneTarget(heads=1 / HEADS), (LAYERS, HIDDEN, HEADS - 1)),
        (zero_layers, kvarn.PruneTarget(layers=2), (LAYERS - 2, HIDDEN, HEADS)),
    ],
)
def test_what_is_zero_goes_and_the_logits_stay(
    tmp_path: Path,
    text: Path,
    change: Callable[[str, Float32], Float32],
    target: kvarn.PruneTarget,
    shape: tuple[int, int, int],
) -> None:
    source, small = write_changed(tmp_path / "source.gguf", change), tmp_path / "small.gguf"
    report = kvarn.prune(source, target, small, options=kvarn.PruneOptions(text=text))
    found = report.after.shape
    assert (found.layers, found.hidden, found.heads) == shape
    assert report.after.num_bytes == small.stat().st_size < source.stat().st_size
    # Sums over fewer terms are added up in another order; the weights themselves are the source's, to the bit.
    np.testing.assert_allclose(logits_of(small), logits_of(source), atol=5e-4)
    kept = GGUFFile(source).array(f"blk.{report.layers[-1]}.ffn_down.weight")
    kept = kept[:, kept.any(axis=0)]
    assert np.array_equal(GGUFFile(small).array(f"blk.{len(report.layers) - 1}.ffn_down.weight"), kept)


def test_layers_of_zeros_are_found(tmp_path: Path, text: Path) -> None:
    source = write_changed(tmp_path / "source.gguf", zero_layers)
    report = kvarn.prune(
        source, kvarn.PruneTarget(layers=2), tmp_path / "small.gguf", options=kvarn.PruneOptions(text=text)
    )
    assert report.removed_layers == (2, 5)
    assert report.kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "target",
    [
        kvarn.PruneTarget(keep=1.0),
        kvarn.PruneTarget(layers=0),
        kvarn.PruneTarget(ffn=0.0),
        kvarn.PruneTarget(layers=0, ffn=0.0, heads=0.0),
    ],
)
def test_nothing_to_remove_is_a_copy_of_every_byte(tmp_path: Path, target: kvarn.PruneTarget) -> None:
    source = write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN)
    report = kvarn.prune(source, target, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()
    assert report.kept == 1
    assert report.kl is None


def test_a_file_that_is_small_enough_is_copied_and_nothing_is_measured(tmp_path: Path, text: Path) -> None:
    source = write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN)
    target = kvarn.PruneTarget(num_bytes=source.stat().st_size)
    report = kvarn.prune(source, target, tmp_path / "copy.gguf", options=kvarn.PruneOptions(text=text))
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()
    assert report.kl is None


@pytest.mark.parametrize(
    ("ratio", "message"), [(1.0, "none would stay"), (0.97, "none would stay"), (0.05, "nothing would go")]
)
def test_a_ratio_of_channels_that_leaves_none_or_all_is_refused_with_those_that_are_possible(
    text: Path, tmp_path: Path, ratio: float, message: str
) -> None:
    source = write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN)
    target, options = kvarn.PruneTarget(layers=1, ffn=ratio), kvarn.PruneOptions(text=text)
    with pytest.raises(ConfigError, match=f"by 32, of {HIDDEN} {message}; give 0.167 to 0.833"):
        kvarn.prune(source, target, tmp_path / "out.gguf", options=options)
    assert list(tmp_path.iterdir()) == [source]
    assert [cut_hidden(HIDDEN, possible, 32) for possible in (0.167, 0.833)] == [HIDDEN - 32, 32]
    for channels, told in ((32, "there are only 32; leave it out"), (64, "give 0.5$")):
        with pytest.raises(ConfigError, match=told):
            cut_hidden(channels, 0.1, 32)


def cut_of(source: GGUFFile) -> Cut:
    """Layers 1 and 6, head 1 of them, 32 channels, every third from 6 on."""
    channels = tuple(range(6, HIDDEN, 3))[:32]
    return Cut(tuple(LayerCut(layer, (1,), (0,), channels) for layer in (1, 6)))


@pytest.mark.parametrize("type", [TensorType.F32, TensorType.F16, TensorType.Q8_0, TensorType.Q4_1])
def test_what_stays_are_the_rows_and_columns_of_the_source(tmp_path: Path, type: TensorType) -> None:
    source = GGUFFile(write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN, type=type))
    cut = cut_of(source)
    found = PrunedWeights(source, describe(source).spec, cut)
    channels, head = np.array(cut.layers[0].channels), np.arange(HEAD_DIM, 2 * HEAD_DIM)
    for new, old in ((0, 1), (1, 6)):
        values = {name: source.array(f"blk.{old}.{name}.weight") for name in ("ffn_up", "attn_q", "attn_output")}
        assert np.array_equal(found.array(f"blk.{new}.ffn_up.weight"), values["ffn_up"][channels])
        assert np.array_equal(found.array(f"blk.{new}.attn_q.weight"), values["attn_q"][head])
        assert np.array_equal(found.array(f"blk.{new}.attn_output.weight"), values["attn_output"][:, head])
    again = {f"blk.{n}.ffn_down.weight" for n in (0, 1)} if type.block_values > 1 else set()
    assert set(found.encoded_again) == again
    assert found.tensors["blk.1.ffn_down.weight"].shape == (WIDTH, len(channels))


def test_heads_of_quantised_rows_are_cut_block_by_block(tmp_path: Path) -> None:
    source = GGUFFile(write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN, type=TensorType.Q4_1))
    found, block = PrunedWeights(source, describe(source).spec, cut_of(source)), TensorType.Q4_1.block_bytes
    stored = source.raw("blk.6.attn_output.weight").reshape(WIDTH, HEADS, block)
    assert np.array_equal(found.raw("blk.1.attn_output.weight").reshape(WIDTH, block), stored[:, 1])


def test_a_whole_cut_keeps_every_tensor(tmp_path: Path) -> None:
    source = GGUFFile(write_float_model(tmp_path / "source.gguf", width=WIDTH, hidden=HIDDEN))
    spec = describe(source).spec
    found = PrunedWeights(source, spec, whole(spec))
    assert found.tensors == dict(source.tensors)
    assert all(np.array_equal(found.raw(name), source.raw(name)) for name in source.tensors)
