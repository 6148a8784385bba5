"""ggml's types without kernels: their values are those of the `gguf` package, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants as gguf_quants

from kvarn.errors import FormatError
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.open import open_weights
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.stored_types.iq_grids import LEVELS, Grid, grid
from kvarn.formats.stored_types.table import STORED_TYPES, StoredType
from kvarn.formats.weights import TensorType, conversions

Bytes = npt.NDArray[np.uint8]

BLOCKS = 600  # more than one chunk has of none, enough for every scale and sign
EXACT = ("MXFP4", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ3_XXS", "IQ3_S")
# Measured over random codes: largest error in parts of a row's root mean square, and the root mean square of all.
LOSSES = {"IQ4_XS": (0.003, 3e-4), "IQ2_XXS": (0.003, 3e-4), "IQ2_XS": (0.03, 5e-3), "IQ2_S": (0.03, 5e-3)}
LOSSES |= {"NVFP4": (0.05, 4e-3)}
HALVES = {"MXFP4": (), "NVFP4": (), "TQ1_0": (52,), "TQ2_0": (64,)}  # where float16 scales lie; else at 0
BY_NAME = {kind.name: kind for kind in STORED_TYPES.values()}
GRIDS: dict[Grid, type] = {
    "iq1": gguf_quants.IQ1_S,
    "iq2_xxs": gguf_quants.IQ2_XXS,
    "iq2_xs": gguf_quants.IQ2_XS,
    "iq2_s": gguf_quants.IQ2_S,
    "iq3_xxs": gguf_quants.IQ3_XXS,
    "iq3_s": gguf_quants.IQ3_S,
}


def random_blocks(kind: StoredType, count: int = BLOCKS) -> Bytes:
    """Blocks of any code with scales as trained weights have them: normal float16 numbers."""
    rng = np.random.default_rng(kind.id)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), np.uint8)
    scales = (rng.uniform(0.001, 0.1, count) * rng.choice([-1, 1], count)).astype("<f2")
    for at in HALVES.get(kind.name, (0,)):
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if kind.name == "IQ1_M":  # four bits of its scale on top of each of four words
        words = blocks[:, 48:].view("<u2")
        words[:] = words & 0x0FFF | (scales.view("<u2")[:, None] >> np.array([0, 4, 8, 12], "<u2") & 15) << 12
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, count)
    if kind.name == "NVFP4":
        blocks[:, :4] = rng.integers(40, 80, (count, 4))
    return blocks


@pytest.mark.parametrize("name", GRIDS)
def test_the_grids_are_those_of_gguf(name: Grid) -> None:
    theirs = GRIDS[name]
    theirs.init_grid()
    halved = 2 if name == "iq3_xxs" else 1
    assert np.array_equal(halved * grid(name), np.asarray(theirs.grid).reshape(theirs.grid_shape))
    assert set(np.unique(grid(name))) == set(LEVELS[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_every_type_of_gguf_is_decoded_bit_for_bit(name: str) -> None:
    kind, theirs = BY_NAME[name], gguf.GGMLQuantizationType[name]
    assert (kind.id, kind.block_values, kind.block_bytes) == (theirs.value, *gguf.GGML_QUANT_SIZES[theirs])
    blocks = random_blocks(kind)
    expected = gguf.dequantize(blocks, theirs).reshape(-1)
    assert np.std(expected) > 0
    assert np.array_equal(kind.decoded(blocks.reshape(-1)).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", EXACT)
def test_what_loses_nothing_has_the_same_values(name: str) -> None:
    kind = BY_NAME[name]
    raw = random_blocks(kind).reshape(-1)
    values = kind.decoded(raw)
    converted = dequantize(kind.converted(raw, "x"), kind.target, values.shape)
    assert np.array_equal(converted, values)
    assert kind.loss == ""


@pytest.mark.parametrize("name", LOSSES)
def test_what_loses_something_says_so_and_loses_little(name: str) -> None:
    kind, (largest, usual) = BY_NAME[name], LOSSES[name]
    raw = random_blocks(kind).reshape(-1)
    values = kind.decoded(raw).reshape(BLOCKS, -1)
    converted = dequantize(kind.converted(raw, "x"), kind.target, values.shape)
    errors = np.abs(converted - values) / np.sqrt(np.mean(values**2, axis=1, keepdims=True))
    assert 0 < errors.max() <= largest
    assert np.sqrt(np.mean(errors**2)) <= usual
    assert kind.loss != ""
    assert {*EXACT, *LOSSES} == BY_NAME.keys()


def test_no_smaller_choice_of_type_is_nearer() -> None:
    """IQ4_XS as IQ4_NL is not further away than as Q8_0, which has twice the bytes, made from its values."""
    kind = BY_NAME["IQ4_XS"]
    raw = random_blocks(kind).reshape(-1)
    values = kind.decoded(raw)
    as_q8_0 = dequantize(quantize(values, TensorType.Q8_0), TensorType.Q8_0, values.shape)
    as_iq4_nl = dequantize(kind.converted(raw, "x"), kind.target, values.shape)
    assert np.square(as_iq4_nl - values).sum() < 0.1 * np.square(as_q8_0 - values).sum()


def _file(folder: Path, kind: StoredType, shape: tuple[int, ...], **others: npt.NDArray[np.float32]) -> Path:
    count = int(np.prod(shape)) // kind.block_values
    blocks = random_blocks(kind, count).reshape(*shape[:-1], -1)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tensor("x.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind.name])
    for name, values in others.items():
        writer.add_tensor(f"x.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_file_says_as_which_type_it_is_run(name: str, tmp_path: Path) -> None:
    kind = BY_NAME[name]
    source = open_weights(_file(tmp_path, kind, (3, 512)))
    info = source.tensors["x.weight"]
    assert (info.type, info.shape) == (kind.target, (3, 512))
    assert source.raw("x.weight").size == info.num_bytes
    expected = gguf.dequantize(random_blocks(kind, 1536 // kind.block_values), gguf.GGMLQuantizationType[name])
    assert np.array_equal(source.array("x.weight"), expected.reshape(3, 512))
    (note,) = conversions(source)
    assert f"{name} weights are run as {kind.target.name}" in note


@pytest.mark.parametrize(("shape", "scales"), [((4, 128), [0.3]), ((3, 4, 128), [0.3, 2.0, 0.01])])
def test_scales_beside_nvfp4_are_multiplied_in(shape: tuple[int, ...], scales: list[float], tmp_path: Path) -> None:
    kind, factors = BY_NAME["NVFP4"], np.array(scales, np.float32)
    source = open_weights(_file(tmp_path, kind, shape, scale=factors, input_scale=factors))
    assert source.tensors.keys() == {"x.weight"}
    plain = kind.decoded(random_blocks(kind, int(np.prod(shape)) // 64).reshape(-1)).reshape(len(scales), -1)
    expected = (plain * factors[:, None]).reshape(shape)
    assert np.array_equal(source.array("x.weight"), expected)
    run = dequantize(source.raw("x.weight"), TensorType.Q8_0, shape)
    assert np.abs(run - expected).max() <= 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("bad", [np.array([1.0, 2.0], np.float32), np.array([np.nan], np.float32)])
def test_scales_that_do_not_fit_are_refused(bad: npt.NDArray[np.float32], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x\.scale"):
        open_weights(_file(tmp_path, BY_NAME["NVFP4"], (4, 128), scale=bad)).raw("x.weight")


def test_a_scale_beside_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored = {"x.weight": Stored.quantized(np.ones((4, 64), np.float32), TensorType.F16)}
    write_gguf(path, {}, stored | {"x.scale": Stored.quantized(np.ones(1, np.float32), TensorType.F32)})
    with pytest.raises(FormatError, match=r"x\.scale"):
        open_weights(path)


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"MXFP4", "NVFP4", "IQ1_M"}))
def test_a_scale_beyond_float16_is_refused_or_kept(name: str) -> None:
    """Scales that are not numbers stay what they are, as in the other types; finite ones never become infinite."""
    kind = BY_NAME[name]
    blocks = random_blocks(kind, 2)
    (at,) = HALVES.get(name, (0,))
    blocks[:, at : at + 2] = np.array([[65504.0], [np.inf]], "<f2").view(np.uint8)
    if name in ("TQ1_0", "TQ2_0", "IQ3_XXS"):
        converted = dequantize(kind.converted(blocks.reshape(-1), "x"), kind.target, (2, kind.block_values))
        assert np.isfinite(converted[0]).all()
        assert not np.isfinite(converted[1]).all()
    else:
        with pytest.raises(FormatError, match="too large for float16"):
            kind.converted(blocks.reshape(-1), "x")


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, BY_NAME["IQ4_XS"], (1, 256))
    data = path.read_bytes()
    at = data.index((256).to_bytes(8, "little"), data.index(b"x.weight"))
    path.write_bytes(data[:at] + (128).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(FormatError, match="not a multiple of IQ4_XS's 256"):
        open_weights(path)
