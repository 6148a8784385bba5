"""kvarn.quantize on tiny models: types by recipe, metadata kept, whole files or none, refusals."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn.errors import ConfigError, FormatError, InvalidParameter
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType
from kvarn.quantization.imatrix import ImportanceMatrix, InputStatistics, write_imatrix
from kvarn.quantization.recipes import MIXES
from tests.float_model import LAYERS, write_float_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "model.gguf")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 and 96 values: no K-quant fits."""
    return write_float_model(tmp_path_factory.mktemp("source") / "narrow.gguf", width=64, hidden=96)


def types(path: Path) -> dict[str, str]:
    return {name: info.type.name for name, info in GGUFFile(path).tensors.items()}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_writes_a_file_that_answers(source: Path, tmp_path: Path, mix: str) -> None:
    report = kvarn.quantize(source, mix, tmp_path / "out.gguf")
    assert report.num_bytes == (tmp_path / "out.gguf").stat().st_size
    with kvarn.LLM(tmp_path / "out.gguf", context=256) as llm:
        params = kvarn.SamplingParams(max_tokens=4, temperature=0)
        assert llm.generate("to be or", params).usage.completion_tokens >= 1


def test_q4_k_m_gives_more_bits_where_llama_cpp_does(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "q4_k_m", tmp_path / "out.gguf")
    found = types(tmp_path / "out.gguf")
    more = [layer for layer in range(LAYERS) if found[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7]
    assert [layer for layer in range(LAYERS) if found[f"blk.{layer}.attn_v.weight"] == "Q6_K"] == more
    assert found["token_embd.weight"] == "Q6_K"
    assert found["blk.1.attn_q.weight"] == "Q4_K"
    assert found["blk.1.attn_norm.weight"] == "F32"


def test_pure_gives_every_matrix_the_one_type(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "Q4_K", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(pure=True))
    assert set(types(tmp_path / "out.gguf").values()) == {"Q4_K", "F32"}


def test_rows_that_do_not_fit_fall_back_and_are_named(narrow: Path, tmp_path: Path) -> None:
    report = kvarn.quantize(narrow, "Q4_K_M", tmp_path / "out.gguf")
    found = types(tmp_path / "out.gguf")
    assert found["blk.1.attn_q.weight"] == "Q5_0"
    assert found["blk.0.ffn_down.weight"] == "Q8_0"
    fallbacks = {change.source.name: (change.wanted.name, change.type.name) for change in report.fallbacks}
    assert fallbacks["blk.1.attn_q.weight"] == ("Q4_K", "Q5_0")
    assert "output_norm.weight" not in fallbacks


def test_metadata_keeps_its_types_and_says_what_was_done(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"general.quirk": np.int8(-3), "general.odd": np.array([1, 2], np.uint16)}
    path = write_float_model(tmp_path / "odd.gguf", **odd)
    kvarn.quantize(path, "Q5_0", tmp_path / "out.gguf")
    before, after = GGUFFile(path), GGUFFile(tmp_path / "out.gguf")
    assert after.metadata["general.file_type"] == 8
    assert after.metadata["general.quantization_version"] == 2
    changed = {"general.file_type", "general.quantization_version"}
    kept = {key: value for key, value in before.stored_metadata().items() if key not in changed}
    assert {key: value for key, value in after.stored_metadata().items() if key not in changed} == kept


def test_two_runs_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name, threads in (("a", 1), ("b", 3)):
        kvarn.quantize(source, "Q3_K_M", tmp_path / name, options=kvarn.QuantizeOptions(threads=threads))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_type_the_source_has_already_is_copied(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "F16", tmp_path / "out.gguf")
    before, after = GGUFFile(source), GGUFFile(tmp_path / "out.gguf")
    assert all(np.array_equal(before.raw(name), after.raw(name)) for name in before.tensors)


def test_a_split_source_becomes_one_file(source: Path, tmp_path: Path) -> None:
    whole = GGUFFile(source)
    arrays = {name: whole.array(name) for name in whole.tensors}
    parts = write_gguf(tmp_path / "split.gguf", whole.stored_metadata(), arrays, split_max_tensors=20)
    kvarn.quantize(parts[0], "Q8_0", tmp_path / "out.gguf")
    assert not [key for key in GGUFFile(tmp_path / "out.gguf").metadata if key.startswith("split.")]
    assert len(parts) > 1


def test_an_importance_matrix_lowers_the_error_it_weighs(source: Path, tmp_path: Path) -> None:
    name = "blk.2.attn_q.weight"
    importance = np.random.default_rng(0).exponential(1, (1, 256)).astype(np.float32) ** 2
    one = InputStatistics(importance * 10, np.full(1, 10, np.float32))
    entries = {f"blk.{layer}.attn_q.weight": one for layer in range(8)}
    write_imatrix(tmp_path / "imatrix.gguf", ImportanceMatrix(entries, ("text",), ("0" * 64,), 4, 512))
    errors = []
    for file, imatrix in (("plain", None), ("weighted", tmp_path / "imatrix.gguf")):
        report = kvarn.quantize(source, "Q4_K_S", tmp_path / file, options=kvarn.QuantizeOptions(imatrix=imatrix))
        values, original = GGUFFile(tmp_path / file).array(name), GGUFFile(source).array(name)
        errors.append(float((importance * (values - original) ** 2).sum()))
        weighted = {change.source.name for change in report.changes if change.is_weighted}
        assert weighted == (set(entries) if imatrix else set())
    assert errors[1] < errors[0]
    assert GGUFFile(tmp_path / "weighted").metadata["quantize.imatrix.chunks_count"] == 4


def test_a_quantised_source_needs_a_confirmation(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "Q8_0", tmp_path / "q8.gguf")
    with pytest.raises(ConfigError, match=r"quantised already: .*Q8_0.*--requantize"):
        kvarn.quantize(tmp_path / "q8.gguf", "Q4_0", tmp_path / "q4.gguf")
    assert not (tmp_path / "q4.gguf").exists()
    kvarn.quantize(tmp_path / "q8.gguf", "Q4_0", tmp_path / "q4.gguf", options=kvarn.QuantizeOptions(requantize=True))
    assert types(tmp_path / "q4.gguf")["blk.0.attn_q.weight"] == "Q4_0"


def test_an_unknown_type_is_refused_with_the_known_ones(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"IQ2_XXS.*Q4_K_M"):
        kvarn.quantize(source, "IQ2_XXS", tmp_path / "out.gguf")


@pytest.mark.parametrize("shape", [(1, 255), (2, 256)], ids=("another width", "another number of matrices"))
def test_an_imatrix_of_another_model_is_refused_by_name(source: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    entries = {"blk.0.attn_q.weight": InputStatistics(np.ones(shape, np.float32), np.ones(shape[0], np.float32))}
    write_imatrix(tmp_path / "imatrix.gguf", ImportanceMatrix(entries))
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight"):
        kvarn.quantize(
            source, "Q4_K", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(imatrix=tmp_path / "imatrix.gguf")
        )


def test_an_imatrix_with_an_unknown_tensor_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    entries = {"blk.99.attn_q.weight": InputStatistics(np.ones((1, 256), np.float32), np.ones(1, np.float32))}
    write_imatrix(tmp_path / "imatrix.gguf", ImportanceMatrix(entries))
    with pytest.raises(FormatError, match=r"blk\.99\.attn_q\.weight"):
        kvarn.quantize(
            source, "Q4_K", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(imatrix=tmp_path / "imatrix.gguf")
        )


def test_an_imatrix_of_a_model_with_fewer_layers_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    one = InputStatistics(np.ones((1, 256), np.float32), np.ones(1, np.float32))
    entries = {f"blk.{layer}.attn_q.weight": one for layer in range(7)}
    write_imatrix(tmp_path / "imatrix.gguf", ImportanceMatrix(entries))
    options = kvarn.QuantizeOptions(imatrix=tmp_path / "imatrix.gguf")
    with pytest.raises(FormatError, match=r"no statistics of blk\.7\.attn_q\.weight"):
        kvarn.quantize(source, "Q4_K", tmp_path / "out.gguf", options=options)
    write_imatrix(tmp_path / "imatrix.gguf", ImportanceMatrix(entries | {"blk.7.attn_q.weight": one}))
    kvarn.quantize(source, "Q4_K", tmp_path / "out.gguf", options=options)


def test_a_model_in_the_place_of_an_imatrix_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"general\.type"):
        kvarn.quantize(source, "Q4_K", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(imatrix=source))


def test_an_existing_output_is_replaced_only_by_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        kvarn.quantize(source, "Q4_0", target)
    assert target.read_text() == "mine"
    kvarn.quantize(source, "Q4_0", target, options=kvarn.QuantizeOptions(force=True))
    assert types(target)["blk.0.attn_q.weight"] == "Q4_0"


def test_the_source_itself_is_never_the_output(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="the source itself"):
        kvarn.quantize(source, "Q4_0", source, options=kvarn.QuantizeOptions(force=True))
    assert source.read_bytes() == before


def test_a_missing_folder_and_a_folder_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        kvarn.quantize(source, "Q4_0", tmp_path / "no" / "out.gguf")
    with pytest.raises(ConfigError, match="is a folder"):
        kvarn.quantize(source, "Q4_0", tmp_path)


def test_a_disk_without_room_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs(tmp_path)  # real figures but for what is free
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000, "total": usage.f_blocks})())
    with pytest.raises(ConfigError, match=r"0\.0 MB free"):
        kvarn.quantize(source, "Q4_0", tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_run_leaves_nothing_behind(source: Path, tmp_path: Path, error: BaseException) -> None:
    def stop(done: int, total: int | None, _label: str) -> None:
        if total and done > total // 2:
            raise error

    with pytest.raises(type(error)):
        kvarn.quantize(source, "Q4_0", tmp_path / "out.gguf", progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_source_with_nan_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    path = write_float_model(tmp_path / "nan.gguf")
    whole = GGUFFile(path)
    arrays = {name: whole.array(name).copy() for name in whole.tensors}
    arrays["blk.3.ffn_up.weight"][5, 5] = np.nan
    write_gguf(tmp_path / "broken.gguf", whole.stored_metadata(), arrays)
    with pytest.raises(FormatError, match=r"blk\.3\.ffn_up\.weight has NaN"):
        kvarn.quantize(tmp_path / "broken.gguf", "Q4_K_M", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("damage", ["cut", "no tensors", "no model"])
def test_a_hostile_source_gets_what_the_loader_gives(source: Path, tmp_path: Path, damage: str) -> None:
    data = source.read_bytes()
    hostile = {"cut": data[:-5000], "no tensors": data[:8] + bytes(8) + data[16:], "no model": b"not a model" * 100}
    (tmp_path / "hostile.gguf").write_bytes(hostile[damage])
    with pytest.raises(FormatError, match=r"hostile\.gguf"):
        kvarn.quantize(tmp_path / "hostile.gguf", "Q4_0", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.gguf"]


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write_float_model(tmp_path / "model.gguf")

    def touch(done: int, total: int | None, _label: str) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(FormatError, match="written to while it was read"):
        kvarn.quantize(path, "Q4_0", tmp_path / "out.gguf", progress=touch)
    assert not (tmp_path / "out.gguf").exists()


def test_values_are_those_of_the_blocks_in_the_file(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "Q6_K", tmp_path / "out.gguf")
    out, before = GGUFFile(tmp_path / "out.gguf"), GGUFFile(source)
    for name in ("blk.0.attn_q.weight", "token_embd.weight"):
        info = out.tensors[name]
        assert info.type is TensorType.Q6_K
        values = dequantize(out.raw(name), info.type, info.shape)
        assert np.abs(values - before.array(name)).max() < 0.05 * np.abs(before.array(name)).max()
