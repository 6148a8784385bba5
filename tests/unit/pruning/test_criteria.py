"""Every criterion against its definition, written out in NumPy; the refit against least squares."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.pruning.importance.activations import Activations, collect_activations
from kvarn.pruning.importance.criteria import best, block_influence
from kvarn.pruning.importance.scores import PartScores
from kvarn.pruning.planner import DAMPING, refitted
from kvarn.quantization.moments import LayerInput
from tests.float_model import LAYERS, write_float_model, write_text
from tests.unit.pruning.models import HIDDEN, Float32, weak_channels, write_changed

WIDTH, HEADS, KV_HEADS, DIM = 128, 4, 2, 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("source") / "model.gguf"
    return GGUFFile(write_float_model(path, width=WIDTH, hidden=HIDDEN, type=TensorType.F32))


@pytest.fixture(scope="module")
def inputs() -> dict[str, Float32]:
    """Rows that ffn_down and attn_output of the first layer read, with means that are not zero."""
    rng = np.random.default_rng(1)
    return {
        name: (rng.standard_normal((400, n)) * rng.random(n) + rng.standard_normal(n)).astype(np.float32)
        for name, n in (("ffn_down", HIDDEN), ("attention_output", WIDTH))
    }


def scores(source: GGUFFile, inputs: dict[str, Float32], by: str) -> PartScores:
    found = Activations(Path(tempfile.gettempdir()))
    for name, x in inputs.items():
        found.add(LayerInput(0, name, x.shape[1], ()), x.mean(axis=0), x.T @ x / np.float32(len(x)))
    states = np.random.default_rng(2).standard_normal((LAYERS + 1, 10, WIDTH)).astype(np.float32)
    return PartScores(source, describe(source).spec, found, states, by)


def test_influence_is_one_minus_the_mean_cosine(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    found = scores(source, inputs, "influence")
    for layer, score in enumerate(found.layers()):
        pairs = zip(found.states[layer], found.states[layer + 1], strict=True)
        cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs]
        assert score == pytest.approx(1 - np.mean(cosines), rel=1e-5)


def test_a_layer_that_only_scales_has_no_influence() -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)
    assert block_influence(np.concatenate([x, 3 * x]))[0] == pytest.approx(0, abs=1e-7)


def test_activation_is_the_rms_of_what_a_part_adds(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    found, down = scores(source, inputs, "activation"), source.array("blk.0.ffn_down.weight")
    for channel in (0, 7, HIDDEN - 1):
        added = np.outer(inputs["ffn_down"][:, channel], down[:, channel])
        assert found.channels(0)[channel] == pytest.approx(np.sqrt((added**2).sum(axis=1).mean()), rel=1e-4)
    output = source.array("blk.0.attn_output.weight")
    for scored, size in ((found.heads(0), DIM), (found.groups(0), 2 * DIM)):
        assert len(scored) == WIDTH // size
        for part, score in enumerate(scored):
            span = slice(part * size, (part + 1) * size)
            added = inputs["attention_output"][:, span] @ output[:, span].T
            assert score == pytest.approx(np.sqrt((added**2).sum(axis=1).mean()), rel=1e-4)


def test_flap_is_the_deviation_of_what_a_part_adds(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    found, down = scores(source, inputs, "flap"), source.array("blk.0.ffn_down.weight")
    for channel in (0, 7, HIDDEN - 1):
        added = np.outer(inputs["ffn_down"][:, channel], down[:, channel])
        assert found.channels(0)[channel] == pytest.approx(np.sqrt(added.var(axis=0).sum()), rel=1e-3)
    output = source.array("blk.0.attn_output.weight")
    for head, score in enumerate(found.heads(0)):
        span = slice(head * DIM, (head + 1) * DIM)
        added = inputs["attention_output"][:, span] @ output[:, span].T
        assert score == pytest.approx(np.sqrt(added.var(axis=0).sum()), rel=1e-3)


def test_magnitude_is_the_largest_weight_of_a_part(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    found = scores(source, inputs, "magnitude")
    arrays = {name.split(".")[2]: source.array(name) for name in source.tensors if name.startswith("blk.0.")}
    for channel in (0, HIDDEN - 1):
        parts = [arrays["ffn_gate"][channel], arrays["ffn_up"][channel], arrays["ffn_down"][:, channel]]
        assert found.channels(0)[channel] == max(np.abs(part).max() for part in parts)
    for head in range(HEADS):
        span = slice(head * DIM, (head + 1) * DIM)
        expected = max(np.abs(arrays["attn_q"][span]).max(), np.abs(arrays["attn_output"][:, span]).max())
        assert found.heads(0)[head] == expected
    for group in range(KV_HEADS):
        rows, wide = slice(group * DIM, (group + 1) * DIM), slice(group * 2 * DIM, (group + 1) * 2 * DIM)
        parts = [arrays["attn_q"][wide], arrays["attn_output"][:, wide], arrays["attn_k"][rows], arrays["attn_v"][rows]]
        assert found.groups(0)[group] == max(np.abs(part).max() for part in parts)
    matrices = [values for values in arrays.values() if values.ndim == 2]
    assert found.layers()[0] == max(np.abs(values).max() for values in matrices)


def test_l2_orders_by_the_product_of_norms(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    found = scores(source, inputs, "l2")
    arrays = {name.split(".")[2]: source.array(name) for name in source.tensors if name.startswith("blk.0.")}
    norm = np.linalg.norm
    for channel in (0, HIDDEN - 1):
        product = (
            norm(arrays["ffn_gate"][channel]) * norm(arrays["ffn_up"][channel]) * norm(arrays["ffn_down"][:, channel])
        )
        assert np.exp(found.channels(0)[channel]) == pytest.approx(product, rel=1e-5)
    for group in range(KV_HEADS):
        rows, wide = slice(group * DIM, (group + 1) * DIM), slice(group * 2 * DIM, (group + 1) * 2 * DIM)
        product = norm(arrays["attn_q"][wide]) * norm(arrays["attn_output"][:, wide])
        product *= norm(arrays["attn_k"][rows]) * norm(arrays["attn_v"][rows])
        assert np.exp(found.groups(0)[group]) == pytest.approx(product, rel=1e-5)
    for head in range(HEADS):
        span = slice(head * DIM, (head + 1) * DIM)
        product = norm(arrays["attn_q"][span]) * norm(arrays["attn_output"][:, span])
        assert np.exp(found.heads(0)[head]) == pytest.approx(product, rel=1e-5)
    logs = [np.log(norm(values)) for values in arrays.values() if values.ndim == 2]
    assert found.layers()[0] == pytest.approx(sum(logs), rel=1e-5)


def test_random_is_the_same_for_a_seed_and_differs_between_layers(source: GGUFFile, inputs: dict[str, Float32]) -> None:
    first, second = scores(source, inputs, "random"), scores(source, inputs, "random")
    assert np.array_equal(first.channels(0), second.channels(0))
    assert not np.array_equal(first.channels(0), first.channels(1))
    assert not np.array_equal(first.layers(), first.heads(0)[: len(first.layers())])


def test_the_best_are_the_largest_in_ascending_order() -> None:
    assert best(np.array([1.0, 5.0, 3.0, 5.0, 0.0]), 3) == (1, 2, 3)


def test_a_refit_is_least_squares_of_the_whole_output() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((500, 6)) @ rng.standard_normal((6, 20)) + 0.5 * rng.standard_normal((500, 20))
    weights, kept = rng.standard_normal((7, 20)).astype(np.float32), np.array([0, 2, 3, 5, 8, 13, 19])
    found = refitted(weights, (x.T @ x / len(x)).astype(np.float32), kept)
    # Damping is a pull towards the old weights: rows of sqrt(n * damping) added to the regression.
    pull = np.sqrt(len(x) * DAMPING * np.mean(np.square(x[:, kept]))) * np.eye(len(kept))
    wanted = np.concatenate([x @ weights.T, pull @ weights[:, kept].T])
    expected = np.linalg.lstsq(np.concatenate([x[:, kept], pull]), wanted, rcond=None)[0].T
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    whole = x @ weights.T

    def error(columns: Float32) -> float:
        return float(np.square(whole - x[:, kept] @ columns.T).mean())

    assert error(found) < 0.8 * error(weights[:, kept])


def test_columns_that_read_nothing_or_weigh_nothing_change_no_others() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, 8)).astype(np.float32)
    weights = rng.standard_normal((3, 8)).astype(np.float32)
    weights[:, 5] = 0
    kept = np.array([0, 1, 2, 3, 4, 6, 7])
    assert np.array_equal(refitted(weights, x.T @ x / len(x), kept), weights[:, kept])


def test_activations_of_a_text_are_moments_of_what_the_matrices_read(tmp_path: Path) -> None:
    model = write_changed(tmp_path / "model.gguf", weak_channels())
    text = read_text(write_text(tmp_path / "text.txt"))
    with closing(collect_activations(model, text, tmp_path, 1, None)) as found:
        one = found[0, "ffn_down"]
        assert one.moments.shape == (HIDDEN, HIDDEN)
        np.testing.assert_allclose(one.moments, one.moments.T, rtol=1e-5)
        importance = found.importance("blk.0.ffn_down.weight")
        assert importance is not None
        np.testing.assert_allclose(one.squares, importance, rtol=1e-3)
        assert (one.covariance.diagonal() > -1e-6).all()
        assert all(found.importance(f"blk.{n}.attn_q.weight") is not None for n in range(LAYERS))
