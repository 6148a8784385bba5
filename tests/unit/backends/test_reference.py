"""The reference backend's own duties: paging, cache types, sampling, scoring, pooling, laziness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.batch import NO_TOKEN, BlockCopy, RowSampling, SampleRows
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import BackendError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.running import all_logits, batch_of, layout_of, scattered_table
from tests.tiny_models import tiny_model

IDS = [5, 9, 77, 3, 150, 8, 8, 21, 40, 4, 99]


def load(path: Path, dtype: str = "f32", **options: bool) -> ReferenceBackend:
    source = open_weights(path)
    described = describe(source)
    backend = ReferenceBackend(**options)
    backend.load(described.spec, described.weights)
    source.close()
    layout = layout_of(described.spec, dtype, block_size=4)
    assert backend.reserve_kv(layout, 16 * layout.block_bytes + 1) == 16
    return backend


def test_dequantising_at_each_use_gives_the_same_logits(tmp_path: Path) -> None:
    path = tiny_model("phi3", tmp_path, "gguf", type=TensorType.Q8_0)
    table = scattered_table(16, 3)
    dense, lazy = (all_logits(load(path, dense=dense), table, IDS, (len(IDS),)) for dense in (True, False))
    np.testing.assert_array_equal(dense, lazy)


def test_k_quants_run_on_wide_models(tmp_path: Path) -> None:
    exact, close = (
        all_logits(
            load(tiny_model("llama", tmp_path, "gguf", type=type, wide=True)), scattered_table(16, 3), IDS, (11,)
        )
        for type in (TensorType.F32, TensorType.Q6_K)
    )
    error = np.abs(exact - close).max()
    assert 0 < error < 0.5


def test_an_f16_cache_rounds_keys_and_values(tmp_path: Path) -> None:
    path, table = tiny_model("llama", tmp_path), scattered_table(16, 3)
    exact, rounded = (all_logits(load(path, dtype), table, IDS, (6, 5)) for dtype in ("f32", "f16"))
    assert 0 < np.abs(exact - rounded).max() < 0.02


def test_a_copied_block_continues_like_the_original(tmp_path: Path) -> None:
    backend = load(tiny_model("llama", tmp_path))
    table = np.array([[3, 7, 1]], np.int32)
    whole = all_logits(backend, table, IDS, (6, 5))[6:]
    backend.copy_blocks([BlockCopy(source=7, target=12, num_tokens=2)])
    other = np.array([[3, 12, 2]], np.int32)
    again = backend.logits(backend.forward(batch_of([(IDS[6:], 6)], other)))
    np.testing.assert_array_equal(whole, again)


def test_sampling_reports_plain_logprobs_beside_the_choice(tmp_path: Path) -> None:
    backend = load(tiny_model("llama", tmp_path))
    hidden = backend.forward(batch_of([(IDS, 0)], scattered_table(16, 3)))
    logits = backend.logits(hidden).astype(np.float64)
    banned = int(logits[4].argmax())
    params = RowSampling(bias_ids=np.array([banned], np.int32), bias_values=np.array([-100], np.float32))
    sampled = backend.sample(hidden, SampleRows(np.array([4, 10], np.int32), (params, RowSampling()), num_top=3))
    p = np.exp(logits[4]) / np.exp(logits[4]).sum()
    assert sampled.top_ids[0, 0] == banned
    assert sampled.token_ids[0] == sampled.top_ids[0, 1]
    assert sampled.token_ids[1] == logits[10].argmax()
    assert sampled.logprobs[0] == pytest.approx(np.log(p[sampled.token_ids[0]]), abs=1e-5)
    assert sampled.entropy[0] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    assert list(sampled.top_logprobs[0]) == pytest.approx(np.sort(np.log(p))[::-1][:3], abs=1e-5)


def test_scores_are_logprobs_of_the_targets(tmp_path: Path) -> None:
    backend = load(tiny_model("gemma2", tmp_path))
    hidden = backend.forward(batch_of([(IDS, 0)], scattered_table(16, 3)))
    targets = np.array([*IDS[1:], 0], np.int32)
    scored = backend.score(hidden, targets, num_top=2)
    logits = backend.logits(hidden).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs, logprobs[np.arange(len(IDS)), targets], atol=1e-5)
    np.testing.assert_array_equal(scored.top_ids[:, 0], logits.argmax(axis=-1))


def test_pooling_takes_each_text_on_its_own() -> None:
    hidden = np.arange(10, dtype=np.float32).reshape(5, 2)
    starts = np.array([0, 2, 5], np.int32)
    backend = ReferenceBackend()
    assert backend.pool(hidden, starts, "mean").tolist() == [[1, 2], [6, 7]]
    assert backend.pool(hidden, starts, "cls").tolist() == [[0, 1], [4, 5]]
    assert backend.pool(hidden, starts, "last").tolist() == [[2, 3], [8, 9]]


@pytest.mark.parametrize("token", [-1, 160])
def test_a_token_outside_the_vocabulary_is_refused(token: int, tmp_path: Path) -> None:
    backend = load(tiny_model("llama", tmp_path))
    with pytest.raises(BackendError, match="vocabulary has 160"):
        backend.forward(batch_of([([1, token], 0)], scattered_table(16, 1)))


def test_damaged_logits_give_no_token(tmp_path: Path) -> None:
    backend = load(tiny_model("llama", tmp_path))
    hidden = np.full((1, 64), np.nan, np.float32)
    sampled = backend.sample(hidden, SampleRows(np.array([0], np.int32), (RowSampling(),)))
    assert sampled.token_ids.tolist() == [NO_TOKEN]


def test_an_encoder_has_no_logits(tmp_path: Path) -> None:
    backend = load(tiny_model("bert", tmp_path))
    with pytest.raises(BackendError, match="use pool"):
        backend.logits(backend.forward(batch_of([(IDS, 0)], np.empty((1, 0), np.int32))))


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    described = describe(open_weights(tiny_model("qwen2", tmp_path)))
    seen: list[tuple[int, int]] = []
    ReferenceBackend().load(described.spec, described.weights, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)
