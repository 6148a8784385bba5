"""Importance matrices: the native sums against the reference backend's, the file format, merging and resuming."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import kvarn
from kvarn.backends.batch import Batch, KVLayout
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference import attention, backend, layers
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import ConfigError, FormatError, InvalidParameter
from kvarn.formats.open import open_weights
from kvarn.models.describe import Description, describe
from kvarn.quantization.imatrix import ImportanceMatrix, InputStatistics, merged, read_imatrix, write_imatrix
from tests.float_model import LAYERS, write_float_model, write_text
from tests.tiny_models import tiny_model

CONTEXT = 64
OPTIONS = kvarn.ImatrixOptions(chunks=6, context=CONTEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("model") / "model.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def collected(model: Path, text: Path, output: Path, **changes: Any) -> ImportanceMatrix:
    options = kvarn.ImatrixOptions(**{"chunks": 6, "context": CONTEXT, **changes})
    return kvarn.collect_imatrix(model, output, text=text, options=options)


def test_the_file_is_what_llama_cpp_expects(model: Path, text: Path, tmp_path: Path) -> None:
    collected(model, text, tmp_path / "imatrix.gguf")
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.chunk_count").contents() == 6
    assert reader.get_field("imatrix.chunk_size").contents() == CONTEXT
    assert reader.get_field("imatrix.datasets").contents() == ["text.txt"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        width = 96 if name == "ffn_down" else 64
        assert list(tensors[f"blk.{LAYERS - 1}.{name}.weight.in_sum2"].shape) == [width, 1]
        assert tensors[f"blk.0.{name}.weight.counts"].data.tolist() == [[6 * CONTEXT]]
    assert "token_embd.weight.in_sum2" in tensors
    assert "blk.0.attn_norm.weight.in_sum2" not in tensors


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "mixtral", "phi3"])
def test_the_sums_are_those_of_what_the_reference_multiplies(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_weights(tiny_model(architecture, tmp_path, "gguf"))
    description = describe(source)
    ids = np.random.default_rng(1).integers(0, description.spec.vocab_size, 24).astype(np.int32)
    seen: dict[str, list[np.ndarray]] = {}
    _record_products(seen, monkeypatch)
    _run(ReferenceBackend(), description, ids)
    native = NativeBackend(2)
    _run(native, description, ids)
    spec = description.spec
    for layer, block in enumerate(spec.blocks):
        width = block.attention.num_heads * block.attention.head_dim
        for input, name, columns in (("qkv", "attn_q", spec.width), ("attention_output", "attn_output", width)):
            found = native.observed_inputs(layer, input, 1, columns)
            x = np.concatenate([one.reshape(-1, columns) for one in seen[f"blk.{layer}.{name}.weight"]])
            np.testing.assert_allclose(found.squares[0], np.square(x).sum(axis=0), rtol=2e-3)
            np.testing.assert_allclose(found.magnitudes[0], np.abs(x).sum(axis=0), rtol=2e-3)
            np.testing.assert_allclose(found.largest[0], np.abs(x).max(axis=0), rtol=2e-3)
            assert found.rows.tolist() == [24]


def _run(running: ReferenceBackend | NativeBackend, description: Description, ids: np.ndarray) -> None:
    """One pass over ids, observed where the backend can be."""
    running.load(description.spec, description.weights)
    shapes = tuple((b.attention.num_kv_heads, b.attention.head_dim) for b in description.spec.blocks)
    layout = KVLayout(16, shapes, "f32")
    running.reserve_kv(layout, 2 * layout.block_bytes)
    if isinstance(running, NativeBackend):
        running.observe_inputs()
    rows, table = np.arange(len(ids), dtype=np.int32), np.arange(2, dtype=np.int32)[None]
    ends = np.array([len(ids)], np.int32)
    running.forward(Batch(ids, rows, np.array([0, len(ids)], np.int32), ends, table, rows))


def _record_products(seen: dict[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the reference multiplies with every matrix."""

    def recording(x: np.ndarray, weights: layers.Weights, name: str, bias: bool = False) -> np.ndarray:
        seen.setdefault(f"{name}.weight", []).append(x)
        return original(x, weights, name, bias)

    original = layers.linear
    for module in (layers, attention, backend):
        if hasattr(module, "linear"):
            monkeypatch.setattr(module, "linear", recording)


def test_experts_count_the_tokens_that_reached_them(tmp_path: Path) -> None:
    description = describe(open_weights(tiny_model("mixtral", tmp_path, "gguf")))
    native = NativeBackend(2)
    _run(native, description, np.arange(20, dtype=np.int32))
    experts = native.observed_inputs(0, "expert_in", 4, 64)
    assert experts.rows.sum() == 20 * 2
    assert native.observed_inputs(0, "ffn_down", 4, 96).rows.tolist() == experts.rows.tolist()
    whole = native.observed_inputs(0, "ffn_in", 1, 64)
    np.testing.assert_allclose(experts.squares.sum(axis=0), 2 * whole.squares[0], rtol=1e-5)


def test_merging_two_halves_gives_the_whole(model: Path, tmp_path: Path) -> None:
    first, second = (write_text(tmp_path / f"{seed}.txt", seed=seed) for seed in (1, 2))
    one = collected(model, first, tmp_path / "one.gguf", chunks=4)
    both = collected(model, second, tmp_path / "both.gguf", chunks=4, merge=[tmp_path / "one.gguf"])
    other = collected(model, second, tmp_path / "two.gguf", chunks=4)
    name = "blk.1.ffn_down.weight"
    np.testing.assert_allclose(
        both.entries[name].sum_squares, one.entries[name].sum_squares + other.entries[name].sum_squares, rtol=1e-6
    )
    assert both.num_chunks == 8
    assert set(both.digests) == {*one.digests, *other.digests}
    assert read_imatrix(tmp_path / "both.gguf").datasets == both.datasets


def test_a_stopped_collection_goes_on(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarn.quantization.collect.SAVE_CHUNKS", 2)

    def stop(done: int, _total: int | None, _label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    output = tmp_path / "imatrix.gguf"
    with pytest.raises(KeyboardInterrupt):
        kvarn.collect_imatrix(model, output, text=text, options=OPTIONS, progress=stop)
    assert read_imatrix(output).num_chunks == 2
    resumed = collected(model, text, output, resume=True)
    whole = collected(model, text, tmp_path / "whole.gguf")
    assert resumed.num_chunks == whole.num_chunks == 6
    for name, found in whole.entries.items():
        np.testing.assert_allclose(resumed.entries[name].sum_squares, found.sum_squares, rtol=1e-5)
        assert resumed.entries[name].counts.tolist() == found.counts.tolist()


def test_what_a_prompt_shows_of_it_is_a_line(model: Path, text: Path, tmp_path: Path) -> None:
    shown = repr(collected(model, text, tmp_path / "small.imatrix"))
    assert len(shown) < 400
    assert repr(text.name) in shown


def test_a_finished_collection_may_still_be_merged(model: Path, text: Path, tmp_path: Path) -> None:
    other = collected(model, write_text(tmp_path / "b.txt", seed=5), tmp_path / "other.gguf", chunks=4)
    whole = collected(model, text, tmp_path / "imatrix.gguf")
    both = collected(model, text, tmp_path / "imatrix.gguf", resume=True, merge=[tmp_path / "other.gguf"])
    assert both.num_chunks == whole.num_chunks + other.num_chunks
    assert read_imatrix(tmp_path / "imatrix.gguf").num_chunks == both.num_chunks


def test_resuming_with_another_text_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    collected(model, text, tmp_path / "imatrix.gguf", chunks=4)
    with pytest.raises(ConfigError, match=r"collected on text\.txt"):
        collected(model, write_text(tmp_path / "b.txt", seed=4), tmp_path / "imatrix.gguf", resume=True)


def test_a_short_text_is_refused(model: Path, tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", num_words=30)
    with pytest.raises(ConfigError, match="says little"):
        collected(model, short, tmp_path / "out.gguf", chunks=None)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InvalidParameter, match="0 tokens"):
        collected(model, tmp_path / "empty.txt", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_statistics_that_cannot_be_are_refused(tmp_path: Path, bad: float) -> None:
    squares = np.ones((1, 64), np.float32)
    squares[0, 5] = bad
    entries = {"blk.0.attn_q.weight": InputStatistics(squares, np.ones(1, np.float32))}
    write_imatrix(tmp_path / "bad.gguf", ImportanceMatrix(entries))
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight are negative or not finite"):
        read_imatrix(tmp_path / "bad.gguf")


def test_counts_so_small_that_means_are_infinite_are_refused(tmp_path: Path) -> None:
    entries = {"blk.0.attn_q.weight": InputStatistics(np.ones((1, 64), np.float32), np.full(1, 1e-40, np.float32))}
    write_imatrix(tmp_path / "bad.gguf", ImportanceMatrix(entries))
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight have means that are not finite"):
        read_imatrix(tmp_path / "bad.gguf")


def test_matrices_of_different_models_do_not_merge() -> None:
    one, other = (
        ImportanceMatrix({"a.weight": InputStatistics(np.ones((1, n), np.float32), np.ones(1, np.float32))})
        for n in (4, 5)
    )
    with pytest.raises(FormatError, match=r"a\.weight"):
        merged(one, other)


Entries = dict[str, InputStatistics]
LAST = f"blk.{LAYERS - 1}."


def wider(entries: Entries) -> Entries:
    name = "blk.0.attn_q.weight"
    return entries | {name: InputStatistics(np.ones((1, 128), np.float32), np.ones(1, np.float32))}


def without_the_last_layer(entries: Entries) -> Entries:
    return {name: found for name, found in entries.items() if not name.startswith(LAST)}


def with_another_layer(entries: Entries) -> Entries:
    return entries | {f"blk.{LAYERS}.attn_q.weight": entries["blk.0.attn_q.weight"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, r"blk\.0\.attn_q\.weight are \(1, 128\), this model's \(1, 64\)"),
        (without_the_last_layer, rf"no statistics of {re.escape(LAST)}"),
        (with_another_layer, rf"blk\.{LAYERS}\.attn_q\.weight, which this model does not have"),
    ],
)
@pytest.mark.parametrize("how", ["merge", "resume"])
def test_what_is_of_another_model_is_refused_before_the_text_is_run(
    model: Path, tmp_path: Path, change: Callable[[Entries], Entries], message: str, how: str
) -> None:
    text, kept, steps = write_text(tmp_path / "text.txt"), tmp_path / "kept.gguf", []
    found = collected(model, text, kept, chunks=4)
    write_imatrix(kept, replace(found, entries=change(dict(found.entries))))
    before = kept.read_bytes()
    resumes = how == "resume"
    output = kept if resumes else tmp_path / "new.gguf"
    options = kvarn.ImatrixOptions(chunks=6, context=CONTEXT, resume=resumes, merge=[] if resumes else [kept])
    with pytest.raises(FormatError, match=message):
        kvarn.collect_imatrix(model, output, text=text, options=options, progress=lambda *step: steps.append(step))
    assert steps == []
    assert kept.read_bytes() == before
    assert output.exists() == resumes


def test_other_chunks_are_not_merged_and_no_text_is_run_for_them(model: Path, text: Path, tmp_path: Path) -> None:
    collected(model, text, tmp_path / "short.gguf", context=32)
    with pytest.raises(FormatError, match="merge matrices of one size"):
        collected(model, text, tmp_path / "new.gguf", merge=[tmp_path / "short.gguf"])
    assert not (tmp_path / "new.gguf").exists()


def test_a_matrix_that_no_token_reached_weighs_evenly() -> None:
    found = InputStatistics(np.array([[4, 2], [0, 0]], np.float32), np.array([2, 0], np.float32))
    assert found.importance.tolist() == [[2, 1], [1, 1]]
