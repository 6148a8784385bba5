"""kvarn.prune on tiny models: budgets, criteria against each other, files that load, refusals, whole files or none."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn.errors import ConfigError, InvalidParameter, UnsupportedModel
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.pruning.families import kept_layers, layer_kinds
from tests.float_model import LAYERS, write_float_model, write_text
from tests.tiny_models import tiny_model
from tests.unit.pruning.models import HIDDEN, WIDTH, weak_channels, write_changed
from tests.unit.quantization.test_folders import write_folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return write_text(folder / "calibration.txt", seed=1), write_text(folder / "held-out.txt", seed=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thirds of the channels of each layer matter little."""
    return write_changed(tmp_path_factory.mktemp("source") / "source.gguf", weak_channels())


def pruned(source: Path, output: Path, text: Path, target: kvarn.PruneTarget, **options: Any) -> kvarn.PruningReport:
    return kvarn.prune(source, target, output, options=kvarn.PruneOptions(text=text, **options))


def kl(model: Path, source: Path, text: Path) -> float:
    options = kvarn.EvaluationOptions(chunks=4, context=64)
    found = kvarn.evaluate(model, text=text, against=source, options=options).divergence
    assert found is not None
    return found.kl_mean


def test_activations_find_what_matters_and_random_loses(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    target, found = kvarn.PruneTarget(ffn=0.5), {}
    for by in ("influence", "activation", "flap", "magnitude", "l2", "random"):
        report = pruned(source, tmp_path / f"{by}.gguf", texts[0], target, by=by)
        found[by] = kl(tmp_path / f"{by}.gguf", source, texts[1])
        is_warned = by in ("magnitude", "l2", "random")
        assert (report.influence_kl is not None) == is_warned
        assert any("looks at no activations" in warning for warning in report.warnings) == is_warned
    assert found["influence"] == found["activation"]
    assert max(found["activation"], found["flap"]) < 0.1 * min(found["random"], found["magnitude"])


def test_a_criterion_that_measured_no_worse_is_not_told_to_be(
    source: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    report = pruned(source, tmp_path / "l2.gguf", texts[0], kvarn.PruneTarget(layers=1), by="l2")
    assert report.kl_unrounded is not None
    for factor, is_worse in ((0.5, True), (1.0, False), (2.0, False)):
        (warning,) = replace(report, influence_kl=factor * report.kl_unrounded).warnings
        assert ("use influence" in warning) == is_worse


def test_a_refit_is_nearer_to_the_source(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    target = kvarn.PruneTarget(ffn=0.75)
    pruned(source, tmp_path / "refit.gguf", texts[0], target)
    pruned(source, tmp_path / "plain.gguf", texts[0], target, refit=False)
    assert kl(tmp_path / "refit.gguf", source, texts[1]) < kl(tmp_path / "plain.gguf", source, texts[1])


@pytest.mark.parametrize("keep", [0.85, 0.6])
def test_a_budget_is_kept_and_the_split_is_the_best_measured(
    source: Path, texts: tuple[Path, Path], tmp_path: Path, keep: float
) -> None:
    report = pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(keep=keep))
    assert keep - 0.1 < report.kept <= keep
    assert len(report.trials) > 2
    assert report.kl_unrounded == min(trial.kl for trial in report.trials)
    # Whole layers would have cost more than the weak channels that went.
    assert report.after.shape.layers == LAYERS
    assert report.after.shape.hidden < HIDDEN


def test_a_file_of_a_size_has_no_room_for_another_step(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    size = int(0.8 * source.stat().st_size)
    report = pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(num_bytes=size))
    shape = report.after.shape
    assert report.after.num_bytes == (tmp_path / "small.gguf").stat().st_size <= size
    assert (report.budget_bytes, report.channel_step) == (size, 32)
    step = shape.layers * 3 * 32 * WIDTH * 4  # gate, up and down in float32
    assert shape.hidden < HIDDEN
    assert report.after.num_bytes + step > size


def test_parts_and_bytes_together_hit_a_size_by_types(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    plain = pruned(source, tmp_path / "plain.gguf", texts[0], kvarn.PruneTarget(keep=0.9), then="Q8_0")
    size = plain.after.num_bytes * 85 // 100
    target = kvarn.SizeTarget(num_bytes=size)
    pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(keep=0.9), then=target)
    assert 0.995 * size <= (tmp_path / "small.gguf").stat().st_size <= size


def test_two_runs_give_the_same_bytes(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    target = kvarn.PruneTarget(layers=1, ffn=0.3)
    for name in ("first", "second"):
        pruned(source, tmp_path / name, texts[0], target, by="random", seed=5)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_pruned_file_answers_and_tells_what_it_is(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    report = pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(layers=2, heads=0.5))
    file = GGUFFile(tmp_path / "small.gguf")
    assert file.metadata["llama.block_count"] == LAYERS - 2
    assert file.metadata["llama.attention.head_count"] == 1
    assert file.metadata["llama.attention.key_length"] == file.metadata["llama.rope.dimension_count"] == 32
    assert list(file.metadata["kvarn.pruning.layers"]) == list(report.layers)
    with kvarn.LLM(tmp_path / "small.gguf", context=256) as llm:
        params = kvarn.SamplingParams(max_tokens=4, temperature=0)
        assert llm.generate("to be or", params).usage.completion_tokens >= 1
    with pytest.raises(InvalidParameter, match="calibrated with"):
        kvarn.evaluate(tmp_path / "small.gguf", text=texts[0])


def test_what_is_quantised_later_remembers_both_texts(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    small, matrix, smaller = (tmp_path / name for name in ("small.gguf", "imatrix", "smaller.gguf"))
    pruned(source, small, texts[0], kvarn.PruneTarget(layers=2))
    few = kvarn.ImatrixOptions(chunks=8, context=64)
    kvarn.collect_imatrix(small, matrix, text=texts[1], options=few)
    kvarn.quantize(small, "Q4_0", smaller, options=kvarn.QuantizeOptions(imatrix=matrix))
    for text in texts:
        with pytest.raises(InvalidParameter, match="calibrated with"):
            kvarn.evaluate(smaller, text=text)


def test_then_quantises_what_is_left(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    report = pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(ffn=0.3), then="Q8_0")
    types = {info.type for info in GGUFFile(tmp_path / "small.gguf").tensors.values()}
    assert types == {TensorType.Q8_0, TensorType.F32}
    assert report.after.num_bytes < 0.3 * source.stat().st_size
    assert list(tmp_path.iterdir()) == [tmp_path / "small.gguf"]
    size = report.after.num_bytes * 8 // 10
    target = kvarn.SizeTarget(num_bytes=size)
    pruned(source, tmp_path / "smaller.gguf", texts[0], kvarn.PruneTarget(ffn=0.3), then=target)
    assert 0.97 * size <= (tmp_path / "smaller.gguf").stat().st_size <= size


def test_a_quantised_source_is_pruned_with_a_warning(texts: tuple[Path, Path], tmp_path: Path) -> None:
    source = write_float_model(tmp_path / "q.gguf", width=WIDTH, hidden=HIDDEN, type=TensorType.Q4_1)
    report = pruned(source, tmp_path / "small.gguf", texts[0], kvarn.PruneTarget(ffn=0.2))
    assert len(report.encoded_again) == LAYERS
    assert "rounded a second time" in report.warnings[0]
    assert GGUFFile(tmp_path / "small.gguf").tensors["blk.0.ffn_down.weight"].type is TensorType.Q4_1
    with pytest.raises(ConfigError, match="--requantize"):
        pruned(source, tmp_path / "then.gguf", texts[0], kvarn.PruneTarget(ffn=0.2), then="Q8_0")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_folder_is_pruned_as_its_gguf_is(arch: str, texts: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", arch, num_hidden_layers=3, max_position_embeddings=1024)
    kvarn.quantize(folder, "F16", tmp_path / "whole.gguf")
    target, found = kvarn.PruneTarget(layers=1, ffn=1 / 3), []
    for model in (folder, tmp_path / "whole.gguf"):
        report = pruned(model, tmp_path / f"{model.name}-small.gguf", texts[0], target)
        found.append(report)
        assert (report.after.shape.layers, report.after.shape.hidden) == (2, 64)
    assert found[0].layers == found[1].layers
    assert found[0].kl == pytest.approx(found[1].kl, rel=0.05)
    file = GGUFFile(tmp_path / "folder-small.gguf")
    assert file.tensors["blk.0.attn_norm.weight"].type is TensorType.F32
    assert file.tensors["blk.0.ffn_down.weight"].type is TensorType.F16


def test_kinds_of_layers_stay_in_their_order(tmp_path: Path) -> None:
    file = GGUFFile(tiny_model("gemma3", tmp_path, "gguf"))  # six windowed layers around the sixth, which is global
    spec = describe(file).spec
    assert len(spec.blocks) == 7
    scores = np.arange(7.0)
    assert kept_layers(spec, layer_kinds(file, spec, 6), scores) == (0, 1, 2, 3, 4, 5)
    assert kept_layers(spec, layer_kinds(file, spec, 5), scores) == (1, 2, 3, 4, 6)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"heads": 0.3}, "does not divide"),
        ({"layers": LAYERS}, "at most 7"),
        ({"keep": 0.001}, "the smallest this model can be has"),
        ({"num_bytes": 1000}, "the smallest this model can be has"),
    ],
)
def test_what_cannot_be_is_refused_with_its_limit(
    source: Path, texts: tuple[Path, Path], tmp_path: Path, target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pruned(source, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(**target))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [(1, {}, "--text"), (0, {"then": "Q8_0"}, "kvarn quantize"), (0, {"heal_minutes": 1.0}, "kvarn quantize")],
)
def test_options_that_do_not_go_together_are_refused(
    source: Path, tmp_path: Path, layers: int, options: dict[str, Any], message: str
) -> None:
    target, chosen = kvarn.PruneTarget(layers=layers), kvarn.PruneOptions(**options)
    with pytest.raises(ConfigError, match=message):
        kvarn.prune(source, target, tmp_path / "out.gguf", options=chosen)
    assert not (tmp_path / "out.gguf").exists()


def test_the_smallest_budget_that_is_told_is_possible(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least") as refused:
        pruned(source, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(num_bytes=1000))
    least = int(str(refused.value).rpartition("--bytes ")[2].rstrip(")"))
    report = pruned(source, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(num_bytes=least))
    assert report.after.num_bytes <= least


def test_the_smallest_share_that_is_told_is_possible(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least") as refused:
        pruned(source, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(keep=1e-4))
    least = float(str(refused.value).rpartition("give at least ")[2].partition(" ")[0])
    assert pruned(source, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(keep=least)).kept <= least


@pytest.mark.parametrize(
    "fields", [{}, {"keep": 0.5, "layers": 1}, {"keep": 1.5}, {"ffn": -0.1}, {"layers": -1}, {"keep": float("nan")}]
)
def test_targets_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, InvalidParameter)):
        kvarn.PruneTarget(**fields)


@pytest.mark.parametrize(("arch", "name"), [("mixtral", "experts"), ("gemma2", "gemma2"), ("phi3", "phi3")])
def test_families_that_cannot_be_pruned_are_named(
    arch: str, name: str, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tiny_model(arch, tmp_path, "gguf")
    with pytest.raises(UnsupportedModel, match=name):
        pruned(model, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(layers=1))


def test_qwen2_keeps_its_heads(texts: tuple[Path, Path], tmp_path: Path) -> None:
    model = tiny_model("qwen2", tmp_path, "gguf")
    with pytest.raises(UnsupportedModel, match="qwen2 cannot lose heads"):
        pruned(model, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(heads=0.5))


def test_a_text_too_short_is_refused(source: Path, tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", num_words=20)
    with pytest.raises(InvalidParameter, match="longer text"):
        pruned(source, tmp_path / "out.gguf", short, kvarn.PruneTarget(layers=1))


def test_a_disk_that_fills_up_leaves_no_file(
    source: Path, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out"
    output.mkdir()
    monkeypatch.setattr("os.replace", full)
    for target in (kvarn.PruneTarget(layers=1), kvarn.PruneTarget(layers=0)):
        with pytest.raises(OSError, match="No space"):
            pruned(source, output / "out.gguf", texts[0], target)
        assert not list(output.iterdir())


def test_layers_of_different_shapes_are_refused(source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    file, uneven = GGUFFile(source), tmp_path / "uneven.gguf"
    tensors = {name: file.array(name) for name in file.tensors}
    for name in ("ffn_gate", "ffn_up"):
        tensors[f"blk.0.{name}.weight"] = tensors[f"blk.0.{name}.weight"][:96]
    tensors["blk.0.ffn_down.weight"] = np.ascontiguousarray(tensors["blk.0.ffn_down.weight"][:, :96])
    lengths = {"llama.feed_forward_length": [96, *([HIDDEN] * (LAYERS - 1))]}
    write_gguf(uneven, {**file.stored_metadata(), **lengths}, tensors)
    with pytest.raises(UnsupportedModel, match="different shapes"):
        pruned(uneven, tmp_path / "out.gguf", texts[0], kvarn.PruneTarget(layers=1))
