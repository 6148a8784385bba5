"""Models with recurrent layers and with latent attention become smaller, too: every type and method, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn.formats.weights import TensorType
from tests.float_model import write_text
from tests.latent_model import write_latent_model
from tests.recurrent_model import write_recurrent_model, write_state_space_model

MODELS = {"recurrent": write_recurrent_model, "latent": write_latent_model}
JUDGED = kvarn.EvaluationOptions(context=64, chunks=8)
ROUNDED = 0.05  # activations and weights in 8 bits, on models of random weights


@pytest.fixture(scope="module", params=list(MODELS))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("source") / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt", num_words=2000, seed=1)


def kl(model: Path, source: Path, folder: Path) -> float:
    judged = write_text(folder / "held-out.txt", num_words=400, seed=2)
    found = kvarn.evaluate(model, text=judged, against=source, options=JUDGED).divergence
    assert found is not None
    return found.kl_mean


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "IQ4_NL"])
def test_every_matrix_gets_a_type_and_convolutions_stay(mix: str, source: Path, tmp_path: Path) -> None:
    report = kvarn.quantize(source, mix, tmp_path / "out.gguf")
    kept = {change.source.name for change in report.changes if change.type is TensorType.F32}
    assert all(name.endswith(("norm.weight", "ssm_conv1d.weight", "bias", "ssm_a")) for name in kept), kept
    assert report.num_bytes < 0.6 * report.source_bytes
    if mix == "Q8_0":
        assert kl(tmp_path / "out.gguf", source, tmp_path) < ROUNDED


@pytest.mark.parametrize("method", ["imatrix", "gptq", "awq", "smoothquant"])
def test_every_method_keeps_the_predictions_of_eight_bits(
    method: str, source: Path, text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"method": method}
    if method == "imatrix":
        few = kvarn.ImatrixOptions(chunks=8, context=64)
        found = kvarn.collect_imatrix(source, tmp_path / "imatrix", text=text, options=few)
        layers = [name for name in found.entries if name.startswith("blk.0.")]
        assert sorted(layers) == [f"blk.0.{name}.weight" for name in ("ffn_down", "ffn_gate", "ffn_up")]
        assert all(np.all(found.entries[name].counts == 8 * 64) for name in layers)
        options["imatrix"] = tmp_path / "imatrix"
    else:
        options["text"] = text
    kvarn.quantize(source, "Q8_0", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(**options))
    assert kl(tmp_path / "out.gguf", source, tmp_path) < ROUNDED


def test_a_size_is_hit_from_below(source: Path, text: Path, tmp_path: Path) -> None:
    options = kvarn.QuantizeOptions(text=text)
    report = kvarn.quantize(source, kvarn.SizeTarget(bits_per_weight=7.0), tmp_path / "out.gguf", options=options)
    assert report.bits_per_weight <= 7.0
    assert kl(tmp_path / "out.gguf", source, tmp_path) < 4 * ROUNDED


def test_states_alone_are_rounded_evenly_and_other_methods_name_the_one_that_works(text: Path, tmp_path: Path) -> None:
    source, out = write_state_space_model(tmp_path / "states.gguf"), tmp_path / "out.gguf"
    for method in ("gptq", "awq", "smoothquant"):
        with pytest.raises(kvarn.ConfigError, match="rtn"):
            kvarn.quantize(source, "Q4_0", out, options=kvarn.QuantizeOptions(method=method, text=text))
    report = kvarn.quantize(source, "Q8_0", out)
    rounded = {change.source.name.split(".")[-2] for change in report.changes if change.type is TensorType.Q8_0}
    assert rounded == {"token_embd", "ssm_in", "ssm_out"}
    assert kl(out, source, tmp_path) < ROUNDED
