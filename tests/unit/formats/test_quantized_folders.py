"""Folders quantised by other programs: their values are read exactly, run as the nearest type, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.errors import FormatError, ModelError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType, conversions
from tests.quantized_folders import Arrays, Floats, awq, gptq, integers, packed

T = TensorType
SHAPE = (48, 256)
GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int"}


def compressed(format_: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights}}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups}


Make = Callable[[np.random.Generator], tuple[Arrays, Floats]]
# method, tensors, type that it is run as, whether exactly
EXACT: list[tuple[dict[str, Any], Make, TensorType]] = [
    *((GPTQ, lambda rng, g=g: gptq(rng, SHAPE, g), T.Q4_0) for g in (32, 64, 128, 256)),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64, symmetric=False), T.Q5_0),
    (GPTQ | {"bits": 8}, lambda rng: gptq(rng, SHAPE, 64, bits=8), T.Q8_0),
    (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda rng: gptq(rng, SHAPE, 64, offset=0), T.Q4_0),
    *((AWQ, lambda rng, g=g: awq(rng, SHAPE, g), T.Q5_0) for g in (32, 64, 128)),
    (AWQ, lambda rng: awq(rng, SHAPE, 128, symmetric=True), T.Q4_0),
    *((compressed(), lambda rng, g=g: packed(rng, SHAPE, g), T.Q4_0) for g in (32, 128, 256)),
    (compressed(), lambda rng: packed(rng, (45, 256), 64, symmetric=False), T.Q5_0),
    (compressed(num_bits=8), lambda rng: packed(rng, SHAPE, 256, bits=8), T.Q8_0),
    (compressed("int-quantized", num_bits=8), lambda rng: integers(rng, SHAPE), T.Q8_0),
    (compressed("naive-quantized", num_bits=8), lambda rng: integers(rng, SHAPE, per_row=False), T.Q8_0),
]
ROUNDED: list[tuple[dict[str, Any], Make]] = [
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64, shuffled=True)),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 16)),
    (GPTQ | {"bits": 8}, lambda rng: gptq(rng, SHAPE, 64, bits=8, symmetric=False)),
    (compressed(), lambda rng: packed(rng, SHAPE, 32, shuffled=True)),
    (compressed(), lambda rng: packed(rng, (48, 40), 8)),
]


def write(folder: Path, config: object, tensors: Arrays) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    save_file(
        {f"x.{name}": values for name, values in tensors.items()} | {"norm": np.ones(4, np.float32)},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("number", range(len(EXACT)))
def test_integers_and_scales_are_run_as_they_are(number: int, tmp_path: Path) -> None:
    config, make, type_ = EXACT[number]
    tensors, values = make(np.random.default_rng(number))
    source = open_weights(write(tmp_path, config, tensors))
    assert source.tensors.keys() == {"x.weight", "norm"}
    info = source.tensors["x.weight"]
    assert (info.type, info.shape) == (type_, values.shape)
    np.testing.assert_array_equal(source.array("x.weight"), values)
    np.testing.assert_array_equal(dequantize(source.raw("x.weight"), info.type, info.shape), values)
    (note,) = conversions(source)
    assert note.endswith(f"are run as {type_.name}: the same values")
    assert "quantization_config" not in source.metadata["hf"]


@pytest.mark.parametrize("number", range(len(ROUNDED)))
def test_what_no_block_holds_is_run_as_f16(number: int, tmp_path: Path) -> None:
    config, make = ROUNDED[number]
    tensors, values = make(np.random.default_rng(number))
    source = open_weights(write(tmp_path, config, tensors))
    info = source.tensors["x.weight"]
    assert (info.type, info.shape) == (T.F16, values.shape)
    np.testing.assert_array_equal(source.array("x.weight"), values)
    run = dequantize(source.raw("x.weight"), info.type, info.shape)
    np.testing.assert_array_equal(run, values.astype(np.float16).astype(np.float32))
    assert "rounded" in conversions(source)[0]


def test_many_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarn.formats.quantized_folders.matrix._CHUNK_VALUES", 256 * 11)  # rows within words
    for config, make in ((GPTQ, gptq), (AWQ, awq), (compressed(), packed)):
        tensors, values = make(np.random.default_rng(0), SHAPE, 64)
        source = open_weights(write(tmp_path, config, tensors))
        np.testing.assert_array_equal(source.array("x.weight"), values)
        run = dequantize(source.raw("x.weight"), source.tensors["x.weight"].type, values.shape)
        np.testing.assert_array_equal(run, values)


def test_tensors_of_one_folder_have_one_type(tmp_path: Path) -> None:
    """Experts are stacked: one of them with other zero points would not fit beside the rest."""
    rng = np.random.default_rng(0)
    folder = write(tmp_path, GPTQ, {})
    stored: Arrays = {}
    for name, symmetric in (("a", True), ("b", False)):
        stored |= {f"{name}.{part}": v for part, v in gptq(rng, SHAPE, 64, symmetric=symmetric)[0].items()}
    save_file(stored, folder / "model.safetensors")
    assert {info.type for info in open_weights(folder).tensors.values()} == {T.Q5_0}


SCALES = {
    "one": lambda rows, _: (),
    "one in a list": lambda rows, _: (1,),
    "rows": lambda rows, _: (rows, 1),
    "flat rows": lambda rows, _: (rows,),
    "blocks": lambda rows, columns: (-(-rows // 128), -(-columns // 128)),
}


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed"])
def test_fp8_has_the_values_of_torch_times_its_scales(method: str, kind: str, suffix: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    rows, columns = 300, 200
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 127, (rows, columns), np.uint8)  # 127 is none
    codes = torch.from_numpy(numbers | rng.choice(np.array([0, 128], np.uint8), numbers.shape))
    scales = torch.from_numpy(rng.uniform(1e-4, 3e-3, SCALES[kind](rows, columns)).astype(np.float32))
    config: dict[str, Any] = {"quant_method": method, "activation_scheme": "dynamic"}
    block = [128, 128] if kind == "blocks" else None
    config["weight_block_size"] = block
    if method == "compressed":
        config = compressed("float-quantized", num_bits=8, type="float", block_structure=block)
        suffix = "weight_scale"
    write(tmp_path, config, {})
    weight = codes.view(torch.float8_e4m3fn)
    stored = {"x.weight": weight, f"x.{suffix}": scales, "x.input_scale": torch.tensor(0.5)}
    save_torch(stored, tmp_path / "model.safetensors")
    if kind == "blocks":
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        spread = scales.reshape(-1, 1)
    expected = (weight.float() * spread).numpy()
    source = open_weights(tmp_path)
    assert source.tensors.keys() == {"x.weight"}
    np.testing.assert_array_equal(source.array("x.weight"), expected)
    run = dequantize(source.raw("x.weight"), T.F16, (rows, columns))
    np.testing.assert_array_equal(run, expected.astype(np.float16).astype(np.float32))
    assert "rounded to 11 bits" in conversions(source)[0]


def _dropped(name: str) -> Callable[[Arrays], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


def _changed(name: str, values: Any) -> Callable[[Arrays], None]:
    return lambda tensors: tensors.__setitem__(name, values)


BROKEN: list[tuple[dict[str, Any], Make, Callable[[Arrays], None], str]] = [
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _dropped("qzeros"), r"x\.qzeros is missing"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _dropped("scales"), r"x\.scales is missing"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("g_idx", np.full(256, 9, np.int32)), r"x\.g_idx"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("g_idx", np.full(256, -1, np.int32)), r"x\.g_idx"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("g_idx", np.zeros(255, np.int32)), r"x\.g_idx"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("scales", np.ones((3, 48), np.float16)), "3 groups"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("scales", np.full((4, 48), np.nan, np.float16)), r"x\.scales"),
    (GPTQ, lambda rng: gptq(rng, SHAPE, 64), _changed("qweight", np.zeros((32, 48), np.int64)), r"x\.qweight"),
    (AWQ, lambda rng: awq(rng, SHAPE, 64), _dropped("qzeros"), r"x\.qzeros is missing"),
    (AWQ, lambda rng: awq(rng, SHAPE, 64), _changed("scales", np.ones((4, 40), np.float16)), r"x\.scales"),
    (compressed(), lambda rng: packed(rng, SHAPE, 64), _dropped("weight_shape"), r"x\.weight_shape is missing"),
    (compressed(), lambda rng: packed(rng, SHAPE, 64), _dropped("weight_scale"), r"x\.weight_scale"),
    (compressed(), lambda rng: packed(rng, SHAPE, 64), _changed("weight_shape", np.array([48, 999])), "weight_shape"),
    (compressed(), lambda rng: packed(rng, SHAPE, 64), _changed("weight_shape", np.array([48, -1])), "weight_shape"),
    (compressed("int-quantized"), lambda rng: integers(rng, SHAPE), _dropped("weight"), r"x\.weight is missing"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_damaged_folder_is_refused_by_the_name_of_the_tensor(number: int, tmp_path: Path) -> None:
    config, make, damage, reason = BROKEN[number]
    tensors, _ = make(np.random.default_rng(0))
    damage(tensors)
    with pytest.raises(FormatError, match=reason):
        open_weights(write(tmp_path, config, tensors)).raw("x.weight")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*known are awq"),
        ({"bits": 4}, "quantised by None"),
        ({"quant_method": ["gptq"]}, "known are awq"),
        ("gptq", "known are awq"),
        (GPTQ | {"bits": 3}, "bits is 3"),
        (GPTQ | {"bits": True}, "bits is True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 8}, "bits is 8"),
        (compressed("marlin-24"), "marlin-24"),
        (compressed(num_bits=2), "num_bits is 2"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed() | {"config_groups": {}}, "config_groups"),
        (compressed() | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": {}}}}, "config_groups"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(config: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        open_weights(write(tmp_path, config, gptq(np.random.default_rng(0), SHAPE, 64)[0]))


def test_the_name_of_another_method_leaves_tensors_that_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"quant_method": "fp8"}, gptq(np.random.default_rng(0), SHAPE, 64)[0])
    with pytest.raises(UnsupportedModel, match=r"x\.g_idx' is I32"):
        open_weights(folder)


def test_fp8_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    write(tmp_path, {"quant_method": "fp8"}, {})
    codes = torch.full((4, 32), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_torch({"x.weight": codes, "x.weight_scale": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"x\.weight"):
        open_weights(tmp_path).raw("x.weight")


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    """Whatever byte of the weights changes: an error of ours or a value, never another exception."""
    rng = np.random.default_rng(3)
    for number, (config, make, _) in enumerate(EXACT):
        path = write(tmp_path / str(number), config, make(rng)[0]) / "model.safetensors"
        stored = load_file(path)
        for name in stored:
            changed = {**stored, name: np.resize(stored[name], [max(1, n - 1) for n in stored[name].shape])}
            save_file(changed, path)
            try:
                source = open_weights(path.parent)
                assert all(source.raw(one).size == info.num_bytes for one, info in source.tensors.items())
            except ModelError as error:
                assert str(error)  # noqa: PT017
