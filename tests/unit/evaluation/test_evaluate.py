"""kvarn.evaluate on tiny models: figures against NumPy, the plot, refusals."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvarn
from kvarn.errors import InvalidParameter, ModelError, UnsupportedModel
from kvarn.evaluation.divergence import token_divergence, token_losses
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.evaluation.plot import BitScale, PlotPoint, bit_scale, plot_points, svg
from kvarn.evaluation.report import table_of
from kvarn.evaluation.tensor_errors import tensor_errors
from kvarn.evaluation.text import cut_chunks, read_text
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from tests.chat_model import chat_metadata
from tests.float_model import write_float_model, write_text
from tests.unit.tokenizer.vocabularies import word_piece

OPTIONS = kvarn.EvaluationOptions(chunks=4, context=64)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "source.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def quantized(source: Path) -> Path:
    kvarn.quantize(source, "Q4_0", source.parent / "q4_0.gguf")
    return source.parent / "q4_0.gguf"


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_divergence_and_losses_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    source = rng.normal(0, 4, (50, 3000)).astype(np.float32)
    logits = (source + rng.normal(0, 0.3, source.shape)).astype(np.float32)
    p, q = softmax(source), softmax(logits)
    found = token_divergence(source, logits)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-4, atol=1e-8)
    assert found.agrees.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    targets = rng.integers(0, 3000, 50).astype(np.int32)
    np.testing.assert_allclose(token_losses(logits, targets), -np.log(q[np.arange(50), targets]), rtol=1e-6)


def test_a_small_divergence_keeps_its_digits() -> None:
    rng = np.random.default_rng(1)
    source = rng.normal(0, 4, (20, 3000)).astype(np.float32)
    logits = (source + rng.normal(0, 1e-2, source.shape)).astype(np.float32)
    p, q = softmax(source), softmax(logits)
    np.testing.assert_allclose(token_divergence(source, logits).kl, (p * np.log(p / q)).sum(axis=1), atol=2e-7)


def test_perplexity_is_that_of_the_scores_of_the_second_halves(source: Path, text: Path) -> None:
    report = kvarn.evaluate(source, text=text, options=OPTIONS)
    with kvarn.LLM(source, context=64) as llm:
        ids = llm.tokenizer.encode(text.read_text(), add_special=False)
        losses = np.concatenate([-llm.score(ids[64 * i : 64 * i + 64])[32:] for i in range(4)])
    assert report.num_scored == len(losses) == 4 * 31
    assert math.isclose(report.perplexity, math.exp(losses.mean()), rel_tol=1e-5)
    assert math.isclose(
        report.perplexity_error, report.perplexity * losses.std(ddof=1) / len(losses) ** 0.5, rel_tol=1e-4
    )
    assert report.divergence is None
    assert report.prefill_tokens_per_s > 0
    assert report.decode_tokens_per_s > 0


def test_a_model_does_not_diverge_from_itself(source: Path, text: Path) -> None:
    found = kvarn.evaluate(source, text=text, against=source, options=OPTIONS).divergence
    assert found is not None
    assert found.kl_max < 1e-6
    assert found.top1 == 1


def test_fewer_bits_diverge_more(source: Path, quantized: Path, text: Path) -> None:
    kvarn.quantize(source, "Q8_0", source.parent / "q8_0.gguf")
    own, q8, q4 = evaluate_all([source.parent / "q8_0.gguf", quantized], text=text, against=source, options=OPTIONS)
    assert own.divergence is None
    assert q8.divergence is not None
    assert q4.divergence is not None
    assert 0 < q8.divergence.kl_mean < q4.divergence.kl_mean
    assert q4.divergence.kl_median <= q4.divergence.kl_99 <= q4.divergence.kl_999 <= q4.divergence.kl_max
    assert q8.bits_per_weight > q4.bits_per_weight > 4
    table = table_of([own, q8, q4])
    assert [row[0] for row in table] == ["model", "source.gguf", "q8_0.gguf", "q4_0.gguf"]
    assert json.loads(json.dumps(q4.as_dict()))["divergence"]["source"] == "source.gguf"
    scale = bit_scale([own, q8, q4])
    assert scale is not None
    assert scale.megabytes(q4.bits_per_weight) == pytest.approx(q4.num_bytes / 1e6, rel=0.01)
    drawing = ET.fromstring(svg(plot_points([own, q8, q4]), "a <title>", scale))
    labels = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"q8_0.gguf", "q4_0.gguf", "a <title>", "bits per weight"} <= set(labels)


def test_larger_files_lie_to_the_right_and_larger_divergences_above() -> None:
    points = [PlotPoint("small", 50, 0.2, 0.01), PlotPoint("large", 100, 0.002, 0.0001)]
    drawing = ET.fromstring(svg(points, "two"))
    circles = {
        next(iter(one)).text: (float(one.attrib["cx"]), float(one.attrib["cy"]))
        for one in drawing.iter("{http://www.w3.org/2000/svg}circle")
    }
    assert circles["small"][0] < circles["large"][0]
    assert circles["small"][1] < circles["large"][1]


def test_each_series_has_its_own_line_and_name() -> None:
    points = [PlotPoint(str(mb), mb, 1 / mb, 0.0, name) for name in ("ours", "theirs") for mb in (50, 100)]
    drawing = ET.fromstring(svg(points, "two"))
    lines = list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2
    assert len({line.attrib["stroke"] for line in lines}) == 2
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)
    labels = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "theirs"} <= labels


def test_labels_of_neighbours_do_not_cover_each_other() -> None:
    points = [
        PlotPoint(name, mb, kl, 0.0) for name, mb, kl in (("Q5_K_S", 50, 0.1), ("Q5_K_M", 51, 0.1), ("", 90, 0.01))
    ]
    drawing = ET.fromstring(svg(points, "two"))
    places = {one.text: one.attrib for one in drawing.iter("{http://www.w3.org/2000/svg}text")}
    first, second = places["Q5_K_S"], places["Q5_K_M"]
    is_apart = abs(float(first["y"]) - float(second["y"])) >= 12 or abs(float(first["x"]) - float(second["x"])) >= 42
    assert is_apart


def test_whole_bits_per_weight_lie_where_their_files_would() -> None:
    points = [PlotPoint("4 bits", 60, 0.2, 0.01), PlotPoint("8 bits", 110, 0.002, 0.0001)]
    drawing = ET.fromstring(svg(points, "two", BitScale(100_000_000, 10e6)))
    ticks = {one.text: float(one.attrib["x"]) for one in drawing.iter("{http://www.w3.org/2000/svg}text")}
    circles = {next(iter(one)).text: one for one in drawing.iter("{http://www.w3.org/2000/svg}circle")}
    assert ticks["4"] == float(circles["4 bits"].attrib["cx"])
    assert ticks["8"] == float(circles["8 bits"].attrib["cx"])


def test_models_of_different_numbers_of_weights_have_no_scale_of_bits(source: Path, text: Path) -> None:
    own = kvarn.evaluate(source, text=text, options=OPTIONS)
    assert bit_scale([own, own]) is not None
    assert bit_scale([own, replace(own, num_weights=own.num_weights - 1)]) is None


def test_a_plot_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="--against"):
        svg([], "nothing")


def test_the_tensor_table_shows_where_the_error_is(source: Path, quantized: Path) -> None:
    found = {one.name: one for one in tensor_errors(quantized, source)}
    assert found["blk.0.attn_q.weight"].type == "Q4_0"
    assert 0.02 < found["blk.0.attn_q.weight"].relative_rms < 0.2
    assert found["token_embd.weight"].relative_rms < 0.01
    assert found["output_norm.weight"].relative_rms == 0
    assert found["output_norm.weight"].signal_db == math.inf


def test_a_text_that_is_too_short_is_refused_with_its_length(source: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ten tokens")
    with pytest.raises(InvalidParameter, match=r"short\.txt has 10 tokens, one chunk needs 64"):
        kvarn.evaluate(source, text=tmp_path / "short.txt", options=OPTIONS)


def test_a_text_in_a_language_that_the_model_cannot_encode_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(word_piece())
    for name, words, is_readable in (("known.txt", "hello world, ", True), ("foreign.txt", "hello мир, ", False)):
        (tmp_path / name).write_text(words * 20, encoding="utf-8")
        text = read_text(tmp_path / name)
        if is_readable:
            assert cut_chunks(text, tokenizer, 16, None).num_available == 60 // 16
            continue
        with pytest.raises(InvalidParameter, match=r"33% of the tokens of foreign\.txt are unknown to the model"):
            cut_chunks(text, tokenizer, 16, None)


def test_a_text_that_is_not_utf8_is_refused_with_the_place(source: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 100)
    with pytest.raises(InvalidParameter, match="0xe9 at offset 3"):
        kvarn.evaluate(source, text=tmp_path / "latin.txt", options=OPTIONS)


def test_the_text_of_the_calibration_is_refused(text: Path, source: Path, tmp_path: Path) -> None:
    options = kvarn.ImatrixOptions(chunks=4, context=64)
    kvarn.collect_imatrix(source, tmp_path / "imatrix.gguf", text=text, options=options)
    kvarn.quantize(
        source, "Q4_0", tmp_path / "out.gguf", options=kvarn.QuantizeOptions(imatrix=tmp_path / "imatrix.gguf")
    )
    with pytest.raises(InvalidParameter, match="calibrated with"):
        kvarn.evaluate(tmp_path / "out.gguf", text=text, options=OPTIONS)
    other = write_text(tmp_path / "other.txt", seed=9)
    assert kvarn.evaluate(tmp_path / "out.gguf", text=other, options=OPTIONS).perplexity > 1


def test_all_files_are_looked_at_before_one_runs(text: Path, source: Path, tmp_path: Path) -> None:
    options = kvarn.ImatrixOptions(chunks=4, context=64)
    kvarn.collect_imatrix(source, tmp_path / "imatrix.gguf", text=text, options=options)
    known = tmp_path / "known.gguf"
    kvarn.quantize(source, "Q4_0", known, options=kvarn.QuantizeOptions(imatrix=tmp_path / "imatrix.gguf"))
    ran: list[str] = []

    def show(done: int, total: int | None, label: str) -> None:
        ran.append(label)

    with pytest.raises(InvalidParameter, match=r"known\.gguf was calibrated with"):
        evaluate_all([source, known], text=text, options=OPTIONS, progress=show)
    with pytest.raises(InvalidParameter, match=r"known\.gguf was calibrated with"):
        evaluate_all([source], against=known, text=text, options=OPTIONS, progress=show)
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        evaluate_all([source, tmp_path / "nothing.gguf"], text=text, options=OPTIONS, progress=show)
    assert not ran


def test_a_source_with_another_vocabulary_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    tokens = chat_metadata()["tokenizer.ggml.tokens"]
    swapped = [*tokens[:97], tokens[98], tokens[97], *tokens[99:]]
    other = write_float_model(tmp_path / "other.gguf", width=64, hidden=96, **{"tokenizer.ggml.tokens": swapped})
    with pytest.raises(InvalidParameter, match=r"other\.gguf .* and source\.gguf .* encode the text differently"):
        kvarn.evaluate(other, text=text, against=source, options=OPTIONS)


def test_states_beyond_the_limit_are_refused_with_the_number_that_fits(
    source: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvarn.evaluation.evaluate.MAX_STATE_BYTES", 3 * 4 * 64 * 32)
    with pytest.raises(InvalidParameter, match="at most 3 chunks"):
        kvarn.evaluate(source, text=text, against=source, options=OPTIONS)


@pytest.mark.parametrize("options", [{"chunks": 0}, {"context": 8}, {"chunks": True}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter):
        kvarn.EvaluationOptions(**options)


def test_a_diffusion_model_is_refused(text: Path) -> None:
    with pytest.raises(UnsupportedModel, match="left to right"):
        kvarn.evaluate("tiny-diffusion", text=text, options=OPTIONS)
