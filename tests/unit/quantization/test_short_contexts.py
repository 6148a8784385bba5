"""Models made for fewer tokens than the usual chunks: measured on as many as they have, by every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvarn
from kvarn.errors import UnsupportedModel
from tests.float_model import write_float_model, write_text

CONTEXT = 96


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    return write_float_model(folder / "source.gguf", width=64, hidden=96, **{"llama.context_length": CONTEXT})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant", "size"])
def test_a_model_of_few_tokens_is_quantised(method: str, source: Path, text: Path, tmp_path: Path) -> None:
    target: Any = kvarn.SizeTarget(bits_per_weight=6) if method == "size" else "Q4_0"
    options = kvarn.QuantizeOptions(method=None if method == "size" else method, text=text)
    kvarn.quantize(source, target, tmp_path / "out.gguf", options=options)
    held_out = write_text(tmp_path / "held-out.txt", seed=2)
    judged = kvarn.EvaluationOptions(context=64, chunks=4)
    found = kvarn.evaluate(tmp_path / "out.gguf", text=held_out, against=source, options=judged).divergence
    assert found is not None
    assert 0 < found.kl_mean < 0.5


def test_a_model_of_few_tokens_is_pruned_healed_and_quantised(source: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = kvarn.PruneOptions(text=text, heal_steps=2, then="Q8_0")
    report = kvarn.prune(source, kvarn.PruneTarget(layers=1), tmp_path / "out.gguf", options=options)
    assert report.healing is not None
    assert report.healing.num_tokens == 2 * CONTEXT


def test_too_few_tokens_to_measure_on_are_refused(text: Path, tmp_path: Path) -> None:
    tiny = write_float_model(tmp_path / "tiny.gguf", width=64, hidden=96, **{"llama.context_length": 32})
    options = kvarn.QuantizeOptions(method="gptq", text=text)
    with pytest.raises(UnsupportedModel, match="was made for 32 tokens"):
        kvarn.quantize(tiny, "Q4_0", tmp_path / "out.gguf", options=options)
