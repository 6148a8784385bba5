"""FP8 folders: codes by the definition of E4M3, the published layouts, what stays as it was, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kvarn
from kvarn.errors import ConfigError, FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.quantization.fp8.scheme import LARGEST, encode
from tests.float_model import write_float_model, write_text
from tests.unit.quantization.test_folders import write_folder

SCHEMES = ("FP8_TENSOR", "FP8_ROW", "FP8_BLOCK")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def decoded(codes: np.ndarray) -> np.ndarray:
    """E4M3 as the definition has it."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    normal = (1 + mantissa / 8) * np.exp2(exponent.astype(np.float32) - 7)
    magnitude = np.where(exponent == 0, mantissa * np.float32(2**-9), normal)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Arrays by name; the codes of FP8 as bytes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    dtypes = {"F8_E4M3": np.uint8, "F32": np.float32, "F16": np.float16}
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    with safe_open(path, "np") as file:  # the library agrees on what there is
        assert set(file.keys()) == set(found)
    return found


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """The weights that another engine computes from the folder."""
    stored = tensors_of(folder)
    values = {}
    for name, array in stored.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        values[name] = array
        if f"{name}_scale" in stored:
            values[name] = decoded(array) * stored[f"{name}_scale"]
        elif f"{name}_scale_inv" in stored:
            tiles = stored[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)
            assert tiles.shape == array.shape
            values[name] = decoded(array) * tiles
    return values


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("source") / "folder", "llama", **WIDE)


def test_every_code_is_its_own_nearest_and_ties_go_to_even() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert (encode(decoded(codes)) == codes).all()
    steps = decoded(np.arange(0x7F, dtype=np.uint8))
    middles = ((steps[1:] + steps[:-1]) / 2).astype(np.float32)
    assert (encode(middles) % 2 == 0).all()
    assert (encode(np.nextafter(middles, np.float32(1e9))) == np.arange(1, 0x7F)).all()
    assert (encode(np.nextafter(middles, np.float32(0))) == np.arange(0x7E)).all()
    assert decoded(encode(np.array([1e9, -1e9], np.float32))).tolist() == [LARGEST, -LARGEST]


def test_codes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.float32(20)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (encode(values) == theirs).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_come_back_within_half_a_step(source: Path, tmp_path: Path, scheme: str) -> None:
    report = kvarn.quantize(source, scheme, tmp_path / "out")
    before, after = tensors_of(source), dequantized(tmp_path / "out")
    assert set(before) == set(after)
    counts = report.types()
    assert counts[scheme] == 7 * 2
    assert report.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    for change in report.changes:
        name, values = change.source.name, before[change.source.name].astype(np.float32)
        if change.type.name != scheme:
            assert after[name].tobytes() == before[name].tobytes()
            continue
        scale = tensors_of(tmp_path / "out")[name + ("_scale_inv" if scheme == "FP8_BLOCK" else "_scale")]
        step = np.maximum(np.abs(values) / 16, scale.max() * 2**-10) * 1.0001
        assert (np.abs(after[name] - values) <= step).all()


def test_the_scales_have_the_published_shapes(source: Path, tmp_path: Path) -> None:
    shapes = {}
    for scheme in SCHEMES:
        kvarn.quantize(source, scheme, tmp_path / scheme)
        stored = tensors_of(tmp_path / scheme)
        shapes[scheme] = {name.removeprefix(QUERY): array.shape for name, array in stored.items() if QUERY in name}
    rows, columns = tensors_of(source)[QUERY].shape
    assert shapes == {
        "FP8_TENSOR": {"": (rows, columns), "_scale": (1,)},
        "FP8_ROW": {"": (rows, columns), "_scale": (rows, 1)},
        "FP8_BLOCK": {"": (rows, columns), "_scale_inv": (rows // 128, columns // 128)},
    }


@pytest.mark.parametrize(
    ("scheme", "method", "words"),
    [
        ("FP8_TENSOR", "compressed-tensors", '"strategy": "tensor"'),
        ("FP8_ROW", "compressed-tensors", '"strategy": "channel"'),
        ("FP8_BLOCK", "fp8", '"weight_block_size": [128, 128]'),
    ],
)
def test_the_config_names_the_scheme(source: Path, tmp_path: Path, scheme: str, method: str, words: str) -> None:
    kvarn.quantize(source, scheme, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert entry["quant_method"] == method
    assert words in json.dumps(entry)
    assert "lm_head" in (entry.get("ignore") or entry["modules_to_not_convert"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_routers_stay_and_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "qwen3moe", **WIDE | {"moe_intermediate_size": 128})
    report = kvarn.quantize(folder, "FP8_ROW", tmp_path / "out")
    kept = {change.source.name for change in report.changes if change.type.name != "FP8_ROW"}
    assert "model.layers.0.mlp.gate.weight" in kept
    assert "model.layers.0.mlp.experts.3.up_proj.weight" not in kept
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in entry["ignore"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_predictions_stay_near_the_sources(source: Path, tmp_path: Path, scheme: str) -> None:
    kvarn.quantize(source, scheme, tmp_path / "out")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((source / name).read_bytes())
    save_file(
        {name: v.astype(np.float32) for name, v in dequantized(tmp_path / "out").items()}, plain / "model.safetensors"
    )
    kvarn.quantize(source, "Q4_0", tmp_path / "q4_0.gguf")
    text = write_text(tmp_path / "text.txt")
    options = kvarn.EvaluationOptions(chunks=4, context=64)
    found = [kvarn.evaluate(m, text=text, against=source, options=options) for m in (plain, tmp_path / "q4_0.gguf")]
    fp8, q4_0 = (report.divergence for report in found)
    assert fp8 is not None
    assert q4_0 is not None
    assert 0 < fp8.kl_mean < 0.25 * q4_0.kl_mean


def test_tiles_that_do_not_fit_fall_back_and_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama", **WIDE | {"intermediate_size": 500})
    report = kvarn.quantize(folder, "FP8_BLOCK", tmp_path / "out")
    assert {c.source.name.split(".")[4] for c in report.fallbacks} == {"gate_proj", "up_proj", "down_proj"}
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in entry["modules_to_not_convert"]


def test_a_model_in_which_no_tile_fits_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama")
    with pytest.raises(UnsupportedModel, match="multiples of 128; FP8_ROW"):
        kvarn.quantize(folder, "FP8_BLOCK", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gguf_sources_options_and_existing_outputs_are_refused(source: Path, tmp_path: Path) -> None:
    model = write_float_model(tmp_path / "model.gguf", width=64, hidden=96)
    with pytest.raises(ConfigError, match="Q8_0"):
        kvarn.quantize(model, "FP8_ROW", tmp_path / "out")
    options = kvarn.QuantizeOptions(method="gptq", text=write_text(tmp_path / "text.txt"))
    with pytest.raises(ConfigError, match="no text, no method gptq"):
        kvarn.quantize(source, "FP8_ROW", tmp_path / "out", options=options)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        kvarn.quantize(source, "FP8_ROW", tmp_path / "out", options=kvarn.QuantizeOptions(force=True))
    assert not list((tmp_path / "out").iterdir())


def test_nan_is_refused_and_an_interrupted_run_leaves_nothing(source: Path, tmp_path: Path) -> None:
    folder, outputs = write_folder(tmp_path / "folder", "llama", **WIDE), tmp_path / "outputs"
    outputs.mkdir()
    tensors = {name: array.copy() for name, array in tensors_of(folder).items()}
    tensors[QUERY][3, 3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=f"{QUERY} has NaN"):
        kvarn.quantize(folder, "FP8_ROW", outputs / "out")

    def stop(done: int, total: int | None, _label: str) -> None:
        if total and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvarn.quantize(source, "FP8_ROW", outputs / "out", progress=stop)
    assert not list(outputs.iterdir())


def test_an_fp8_folder_is_no_source_for_another(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "FP8_ROW", tmp_path / "out")
    with pytest.raises((ConfigError, UnsupportedModel)):
        kvarn.quantize(tmp_path / "out", "FP8_ROW", tmp_path / "again")
    with pytest.raises(ConfigError, match="quantised already"):
        kvarn.quantize(tmp_path / "out", "Q8_0", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_fp8_folder_runs_with_the_weights_that_were_written(source: Path, tmp_path: Path) -> None:
    kvarn.quantize(source, "FP8_ROW", tmp_path / "out")
    first, second = (describe(open_weights(path)).weights for path in (source, tmp_path / "out"))
    for name, info in first.tensors.items():
        original, read = first.array(name), second.array(name)
        assert np.abs(read - original).max() <= 0.07 * np.abs(original).max(), info


def test_a_file_beside_the_weights_that_is_no_tokenizers_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama", **WIDE)
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate(1 << 40)  # a hole, no bytes
    with pytest.raises(FormatError, match=r"vocab\.txt.*are allowed"):
        kvarn.quantize(folder, "FP8_ROW", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
