"""The torch backend on the CPU against the reference on tiny models of every architecture, and against itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.backends.select import device_weights
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.recurrent_model import write_recurrent_model
from tests.running import all_logits, batch_of, layout_of, scattered_table
from tests.tiny_models import DECODERS, VOCAB, tiny_model
from tests.torch_backend import torch_cpu

NUM_TOKENS = 90  # past every sliding window
QUANTISED = [type for type in TensorType if type.block_values > 1]


def _ids(count: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, count)]


def _loaded(backend: Backend, path: Path, dtype: str = "f32", num_blocks: int = 32) -> Backend:
    description = describe(open_weights(path))
    weights = description.weights
    if backend.name == "torch":
        weights = device_weights(description.spec, weights, EngineConfig(backend="torch"))
    backend.load(description.spec, weights)
    layout = layout_of(description.spec, dtype)
    backend.reserve_kv(layout, num_blocks * layout.block_bytes)
    return backend


def _table() -> npt.NDArray[np.int32]:
    return scattered_table(32, 8)


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", DECODERS)
def test_float_models_give_the_reference_logits(arch: str, format: str, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, format)  # type: ignore[arg-type]
    ours, defined = (all_logits(_loaded(b, path), _table(), _ids(), [NUM_TOKENS]) for b in (torch_cpu(), _reference()))
    np.testing.assert_allclose(ours, defined, atol=2e-5 * max(1.0, float(np.abs(defined).max())))


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_quantised_weights_give_the_reference_logits(type: TensorType, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, "gguf", type=type, wide=True)
    ours, defined = (all_logits(_loaded(b, path), _table(), _ids(), [NUM_TOKENS]) for b in (torch_cpu(), _reference()))
    np.testing.assert_allclose(ours, defined, atol=5e-5 * max(1.0, float(np.abs(defined).max())))


@pytest.mark.parametrize("arch", DECODERS)
def test_an_f16_cache_rounds_as_the_reference_does(arch: str, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, "gguf")
    runs = [(torch_cpu(), "f16"), (_reference(), "f16"), (_reference(), "f32")]
    ours, defined, exact = (all_logits(_loaded(b, path, dtype), _table(), _ids(), [NUM_TOKENS]) for b, dtype in runs)
    away, rounding = (np.linalg.norm(logits - defined, axis=-1).mean() for logits in (ours, exact))
    assert away < 0.3 * rounding


@pytest.mark.parametrize("arch", DECODERS)
def test_chunks_threads_and_neighbours_change_no_bit(arch: str, tmp_path: Path) -> None:
    path, ids = tiny_model(arch, tmp_path, "gguf", type=TensorType.Q4_0), _ids()
    backend = _loaded(torch_cpu(), path, "f16")
    whole = all_logits(backend, _table(), ids, [NUM_TOKENS])
    for chunks in [16] * 5 + [10], [33, 1, 1, 1, 54], [1] * 9 + [81]:
        np.testing.assert_array_equal(all_logits(backend, _table(), ids, chunks), whole)
    np.testing.assert_array_equal(_beside_a_neighbour(_loaded(torch_cpu(2), path, "f16"), ids), whole)


def _beside_a_neighbour(backend: Backend, ids: list[int]) -> npt.NDArray[np.float32]:
    blocks = np.random.default_rng(1).permutation(32).astype(np.int32)
    tables, other = blocks[:16].reshape(2, 8), _ids(NUM_TOKENS, seed=4)
    logits = []
    for start in range(0, NUM_TOKENS, 45):
        spans = [(other[start : start + 45], start), (ids[start : start + 45], start)]
        logits.append(backend.logits(backend.forward(batch_of(spans, tables)))[45:])
    return np.concatenate(logits)


def test_long_contexts_are_merged_piece_by_piece(tmp_path: Path) -> None:
    """1,300 keys in six pieces, whole and in chunks of any size, are the same bits and the reference's logits."""
    path, ids, table = tiny_model("llama", tmp_path, "gguf"), _ids(1300), scattered_table(96, 96)
    runs = [(torch_cpu(), [1300]), (torch_cpu(), [700, 590] + [1] * 10), (_reference(), [1300])]
    whole, chunked, defined = (all_logits(_loaded(b, path, "f32", 96), table, ids, c)[-10:] for b, c in runs)
    np.testing.assert_array_equal(chunked, whole)
    np.testing.assert_allclose(whole, defined, atol=2e-5 * max(1.0, float(np.abs(defined).max())))


def test_encoders_give_the_reference_states(tmp_path: Path) -> None:
    path, ids = tiny_model("bert", tmp_path, "safetensors"), _ids(40)
    for table in (_table(), np.empty((1, 0), np.int32)):  # cached, and all of it in the batch
        ours, defined = (_loaded(b, path).forward(batch_of([(ids, 0)], table)) for b in (torch_cpu(), _reference()))
        np.testing.assert_allclose(ours, defined, atol=2e-5 * float(np.abs(defined).max()))


def test_a_copied_block_answers_as_the_original(tmp_path: Path) -> None:
    path, ids = tiny_model("llama", tmp_path, "gguf"), _ids(40)
    backend, table = _loaded(torch_cpu(), path), np.arange(8, dtype=np.int32)[None]
    whole = all_logits(backend, table, ids, [40])
    backend.copy_blocks([BlockCopy(i, 20 + i, 16) for i in range(2)])
    copied = backend.logits(backend.forward(batch_of([(ids[32:], 32)], table + 20)))
    np.testing.assert_array_equal(copied, whole[32:])
    backend.copy_blocks([BlockCopy(20, 24, 16), BlockCopy(24, 26, 16), BlockCopy(21, 27, 16)])  # in this order
    chained = np.array([[26, 27, 28, 29]], np.int32)
    np.testing.assert_array_equal(backend.logits(backend.forward(batch_of([(ids[32:], 32)], chained))), whole[32:])


def test_layers_one_by_one_are_the_whole_pass(tmp_path: Path) -> None:
    backend, ids = _loaded(torch_cpu(), tiny_model("gemma3", tmp_path, "gguf")), _ids(50)
    whole = backend.logits(backend.forward(batch_of([(ids, 0)], _table())))
    passage, pieces = backend.begin(batch_of([(ids, 0)], _table())), 1
    while (hidden := passage.advance(0.0)) is None:
        pieces += 1
    assert pieces == 7
    assert passage.piece_s > 0
    np.testing.assert_array_equal(backend.logits(hidden), whole)


def test_batches_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    backend = _loaded(torch_cpu(), tiny_model("llama", tmp_path, "gguf"))
    good = batch_of([([5, 6, 7], 0)], _table())
    for field, value in [
        ("token_ids", np.asarray([5, VOCAB, 7], np.int32)),
        ("token_ids", np.asarray([5, -1, 7], np.int32)),
        ("positions", np.asarray([0, 2, 3], np.int32)),
        ("positions", np.asarray([-1, 0, 1], np.int32)),
        ("context_lens", np.asarray([2], np.int32)),
        ("context_lens", np.asarray([2**31 - 1], np.int32)),
        ("block_tables", np.full((1, 8), 32, np.int32)),
        ("block_tables", np.full((1, 8), -1, np.int32)),
        ("row_starts", np.asarray([0, 4], np.int32)),
        ("row_starts", np.asarray([1, 3], np.int32)),
        ("output_rows", np.asarray([3], np.int32)),
    ]:
        with pytest.raises(ValueError, match=r"\w+"):
            backend.forward(replace(good, **{field: value}))
    backend.forward(good)


def test_slots_of_states_that_are_not_there_are_refused(tmp_path: Path) -> None:
    backend = _loaded(torch_cpu(), write_recurrent_model(tmp_path / "model.gguf"))
    batch = batch_of([([3, 4, 5], 0)], _table())
    assert batch.states is not None
    one, far = np.array([0], np.int32), np.array([10_000], np.int32)
    changes = ({"read": far}, {"written": -one - 1}, {"saved_rows": one}, {"saved_rows": one, "saved_slots": far})
    for change in changes:
        with pytest.raises(ValueError, match="state"):
            backend.forward(replace(batch, states=replace(batch.states, **change)))


def test_what_the_cache_cannot_be_is_refused(tmp_path: Path) -> None:
    backend = _loaded(torch_cpu(), tiny_model("llama", tmp_path, "gguf"))
    with pytest.raises(ConfigError, match=r"q8_0.*f16, f32"):
        backend.reserve_kv(layout_of(describe(open_weights(tiny_model("llama", tmp_path, "gguf"))).spec, "q8_0"), 2**20)


def _reference() -> Backend:
    return ReferenceBackend()
