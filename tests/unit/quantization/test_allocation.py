"""Types chosen for a size: the knapsack, the measured divergence, and the file that comes out."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvarn
from kvarn.backends.native import _native
from kvarn.errors import ConfigError, InvalidParameter
from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from kvarn.quantization.allocation.choose import SizedOption, choose
from kvarn.quantization.allocation.probe import DivergenceProbe, Replacement
from kvarn.quantization.blocks import requantized
from tests.float_model import write_float_model, write_text

IGNORED = 3  # a layer whose sublayers write nothing


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 and 96 values; what layer 3 computes is multiplied by zeros."""
    folder = tmp_path_factory.mktemp("source")
    made = GGUFFile(write_float_model(folder / "made.gguf", width=64, hidden=96))
    tensors = {name: Stored(info.type, info.shape, made.raw(name)) for name, info in made.tensors.items()}
    for kind in ("attn_output", "ffn_down"):
        name = f"blk.{IGNORED}.{kind}.weight"
        info = made.tensors[name]
        tensors[name] = Stored(info.type, info.shape, np.zeros(info.num_bytes, np.uint8))
    write_gguf(folder / "model.gguf", made.stored_metadata(), tensors)
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt", seed=1)


def of_size(source: Path, text: Path, output: Path, **size: float) -> kvarn.QuantizationReport:
    target = kvarn.SizeTarget(**size)  # type: ignore[arg-type]
    return kvarn.quantize(source, target, output, options=kvarn.QuantizeOptions(text=text))


def types(path: Path) -> dict[str, TensorType]:
    return {name: info.type for name, info in GGUFFile(path).tensors.items()}


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    items = [
        [SizedOption(rng.randint(1, 200), rng.random()) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 6))
    ]
    least = sum(min(option.num_bytes for option in options) for options in items)
    budget = least + rng.randint(0, 400)
    chosen = choose(items, budget)
    picked = [options[index] for options, index in zip(items, chosen, strict=True)]
    assert sum(option.num_bytes for option in picked) <= budget
    best = min(
        sum(option.cost for option in combination)
        for combination in itertools.product(*items)
        if sum(option.num_bytes for option in combination) <= budget
    )
    assert sum(option.cost for option in picked) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.52])
def test_a_size_is_hit_from_below_and_twice_the_same(source: Path, text: Path, tmp_path: Path, share: float) -> None:
    size = int(share * source.stat().st_size)
    for name in ("a", "b"):
        report = of_size(source, text, tmp_path / name, num_bytes=size)
        assert report.kl is not None
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert 0.995 * size <= (tmp_path / "a").stat().st_size <= size


def test_bits_per_weight_are_hit_from_below(source: Path, text: Path, tmp_path: Path) -> None:
    report = of_size(source, text, tmp_path / "out.gguf", bits_per_weight=6.0)
    assert 0.995 * 6 <= report.bits_per_weight <= 6


def test_what_changes_no_prediction_gets_the_fewest_bits(source: Path, text: Path, tmp_path: Path) -> None:
    of_size(source, text, tmp_path / "out.gguf", bits_per_weight=7.0)
    found = types(tmp_path / "out.gguf")
    ignored = {found[f"blk.{IGNORED}.{kind}.weight"] for kind in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")}
    assert {type.num_bytes(32) for type in ignored} == {18}
    assert any(type.num_bytes(32) > 18 for name, type in found.items() if name.startswith("blk.1."))


def test_more_bytes_give_less_divergence(source: Path, text: Path, tmp_path: Path) -> None:
    held_out = write_text(tmp_path / "held-out.txt", seed=2)
    found = []
    for number, bits in enumerate((4.8, 6.0, 8.0)):
        of_size(source, text, tmp_path / str(number), bits_per_weight=bits)
        options = kvarn.EvaluationOptions(chunks=4, context=128)
        report = kvarn.evaluate(tmp_path / str(number), text=held_out, against=source, options=options)
        assert report.divergence is not None
        found.append(report.divergence.kl_mean)
    assert found[0] > 1.5 * found[1] > 1.5 * 1.5 * found[2]


def test_a_size_below_the_smallest_possible_is_refused_with_the_number(
    source: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"give at least [\d,]+ bytes") as refusal:
        of_size(source, text, tmp_path / "out.gguf", num_bytes=100_000)
    assert list(tmp_path.iterdir()) == []
    least = int(str(refusal.value).split("give at least ")[1].split(" bytes")[0].replace(",", ""))
    assert of_size(source, text, tmp_path / "out.gguf", num_bytes=least).num_bytes == least
    with pytest.raises(ConfigError, match=r"give at least [\d.]+ bits per weight") as refusal:
        of_size(source, text, tmp_path / "few.gguf", bits_per_weight=1.5)
    bits = float(str(refusal.value).split("give at least ")[1].split()[0])
    assert bits - 0.002 <= of_size(source, text, tmp_path / "few.gguf", bits_per_weight=bits).bits_per_weight <= bits


def test_the_text_of_a_size_may_not_judge_the_file(source: Path, text: Path, tmp_path: Path) -> None:
    of_size(source, text, tmp_path / "out.gguf", bits_per_weight=6)
    with pytest.raises(InvalidParameter, match="calibrated with"):
        kvarn.evaluate(tmp_path / "out.gguf", text=text, against=source)


def test_sizes_that_say_nothing_are_refused(source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        kvarn.SizeTarget()
    with pytest.raises(ConfigError, match="exactly one"):
        kvarn.SizeTarget(num_bytes=1000, bits_per_weight=4)
    with pytest.raises(InvalidParameter, match="bpw is nan"):
        kvarn.SizeTarget(bits_per_weight=float("nan"))
    target = kvarn.SizeTarget(bits_per_weight=6)
    for options, message in (
        (kvarn.QuantizeOptions(), "needs a text"),
        (kvarn.QuantizeOptions(pure=True, text=text), "pure"),
        (kvarn.QuantizeOptions(method="rtn", text=text), "rtn"),
    ):
        with pytest.raises(ConfigError, match=message):
            kvarn.quantize(source, target, tmp_path / "out.gguf", options=options)
    with pytest.raises(ConfigError, match="a text is for a size"):
        kvarn.quantize(source, "Q4_0", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(text=text))
    assert list(tmp_path.iterdir()) == []


def test_a_short_text_and_a_quantised_source_are_refused_before_any_work(
    source: Path, text: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("to be or not to be")
    with pytest.raises((InvalidParameter, ConfigError), match=r"short\.txt"):
        of_size(source, short, tmp_path / "out.gguf", bits_per_weight=6)
    quantised = tmp_path / "q8.gguf"
    kvarn.quantize(source, "Q8_0", quantised)
    with pytest.raises(ConfigError, match="--requantize"):
        of_size(quantised, text, tmp_path / "out.gguf", bits_per_weight=6)
    confirmed = kvarn.QuantizeOptions(requantize=True, text=text)
    target = kvarn.SizeTarget(bits_per_weight=6)
    report = kvarn.quantize(quantised, target, tmp_path / "out.gguf", options=confirmed)
    assert report.bits_per_weight <= 6


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight", "blk.5.attn_v.weight"])
def test_the_probe_agrees_with_the_whole_vocabulary(source: Path, text: Path, name: str) -> None:
    team = _native.ThreadTeam(2)
    with closing(DivergenceProbe(source, read_text(text), 2)) as probe:
        info = probe.weights.tensors[name]
        raw = np.concatenate(list(requantized(probe.weights.raw(name), info, TensorType.Q4_0, None, team)))
        rounded = Replacement(TensorType.Q4_0, raw)
        exact = probe.full_divergence({name: rounded})
        assert exact > 1e-6
        assert probe.divergence({name: rounded}) == pytest.approx(exact, rel=0.15)
        same = Replacement(info.type, np.ascontiguousarray(probe.weights.raw(name)))
        assert probe.divergence({name: same}) == 0.0, "a pass from a middle layer has the bits of a whole one"
        assert probe.full_divergence({name: same}) == 0.0
