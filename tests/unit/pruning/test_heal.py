"""Healing: the differentiable decoder computes what the reference does, and a student comes nearer to its teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvarn
from kvarn.errors import ConfigError, InvalidParameter
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.models.describe import describe
from tests.float_model import write_float_model, write_text
from tests.tiny_models import tiny_model
from tests.unit.pruning.models import logits_of

torch = pytest.importorskip("torch")

from kvarn.backends.torch.training.dense import DenseDecoder, unsupported  # noqa: E402
from kvarn.backends.torch.training.distill import rate_share  # noqa: E402


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "source.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt", num_words=2500)


def test_the_decoder_computes_the_same_logits(source: Path) -> None:
    file = GGUFFile(source)
    spec = describe(file).spec
    model = DenseDecoder(spec, list(file.tensors), file.array, torch.device("cpu"))
    ids = np.random.default_rng(0).integers(3, 40, 24).astype(np.int64)
    with torch.inference_mode():
        found = model.logits(model.hidden(torch.from_numpy(ids[None, :-1]))[0])
    np.testing.assert_allclose(found.numpy(), logits_of(source), atol=1e-3)


@pytest.mark.parametrize(("arch", "wrong"), [("mixtral", "experts"), ("gemma2", "a softcap of scores")])
def test_what_it_does_not_compute_is_named(arch: str, wrong: str, tmp_path: Path) -> None:
    spec = describe(GGUFFile(tiny_model(arch, tmp_path, "gguf"))).spec
    assert wrong in unsupported(spec)


def test_healing_comes_nearer_to_the_source_and_repeats_itself(source: Path, text: Path, tmp_path: Path) -> None:
    target = kvarn.PruneTarget(layers=3)
    plain = kvarn.prune(source, target, tmp_path / "plain.gguf", options=kvarn.PruneOptions(text=text))
    options = kvarn.PruneOptions(text=text, heal_steps=16, seed=4)
    healed = [kvarn.prune(source, target, tmp_path / name, options=options) for name in ("first", "second")]
    assert healed[0].healing is not None
    assert healed[0].healing.steps == 16
    assert healed[0].kl is not None
    assert plain.kl is not None
    assert healed[0].kl < plain.kl
    assert not healed[0].warnings
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    tensors = GGUFFile(tmp_path / "first").tensors
    assert tensors == dict(GGUFFile(tmp_path / "plain.gguf").tensors)


def test_healing_ends_after_its_minutes(source: Path, text: Path, tmp_path: Path) -> None:
    options = kvarn.PruneOptions(text=text, heal_minutes=1 / 60)
    report = kvarn.prune(source, kvarn.PruneTarget(layers=3), tmp_path / "out.gguf", options=options)
    assert report.healing is not None
    assert report.healing.steps >= 1
    one_more = report.healing.seconds / report.healing.steps
    assert 1 <= report.healing.seconds <= 1 + 4 * one_more  # it looks at the clock before each step


def test_healing_needs_more_text(source: Path, tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", num_words=500)
    options = kvarn.PruneOptions(text=short, heal_steps=2)
    with pytest.raises(InvalidParameter, match="healing needs"):
        kvarn.prune(source, kvarn.PruneTarget(layers=3), tmp_path / "out.gguf", options=options)
    assert not (tmp_path / "out.gguf").exists()


def test_healing_without_torch_is_refused_before_the_work(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvarn.pruning.heal.find_spec", lambda _: None)
    options = kvarn.PruneOptions(text=text, heal_steps=2)
    with pytest.raises(ConfigError, match=r"kvarn\[torch\]"):
        kvarn.prune(source, kvarn.PruneTarget(layers=3), tmp_path / "out.gguf", options=options)


def test_the_rate_warms_up_and_falls() -> None:
    shares = [rate_share(step, step / 100) for step in range(100)]
    assert shares[0] < shares[4] < max(shares) <= 1.0
    assert shares[-1] == pytest.approx(0.1, abs=0.01)
    assert shares.index(max(shares)) < 10
