"""The native backend against the reference on tiny random models of every architecture, and against itself.

Float weights are compared as floats: what differs is the order of additions and the kernels' own exp. Quantised weights
also round the activations to int8, so there the distance is held against the size of the logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.config import CPU_KV_DTYPES
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.running import all_logits, batch_of, layout_of, scattered_table
from tests.tiny_models import ARCHITECTURES, DECODERS, VOCAB, tiny_model

NUM_TOKENS = 90  # past one tile of 64 keys and past every sliding window
QUANTISED = [type for type in TensorType if type.block_values > 1]
ROUNDING = 0.04  # int8 activations cost about 0.5% at each of a dozen products in a row


def _ids(count: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, count)]


def _loaded(backend: Backend, path: Path, dtype: str = "f32") -> Backend:
    description = describe(open_weights(path))
    backend.load(description.spec, description.weights)
    layout = layout_of(description.spec, dtype)
    backend.reserve_kv(layout, 32 * layout.block_bytes)
    return backend


def _table() -> npt.NDArray[np.int32]:
    return scattered_table(32, 8)


@pytest.fixture(params=[*_native.isa_names(), *_native.kernels.emulated_tables()])
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", DECODERS)
def test_float_models_give_the_reference_logits(arch: str, format: str, isa: str, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, format)
    native, reference = _loaded(NativeBackend(2, isa), path), _loaded(ReferenceBackend(), path)
    ours, defined = (all_logits(b, _table(), _ids(), [NUM_TOKENS]) for b in (native, reference))
    np.testing.assert_allclose(ours, defined, atol=2e-5 * max(1.0, float(np.abs(defined).max())))


@pytest.mark.parametrize("arch", DECODERS)
def test_a_q8_0_cache_rounds_as_the_reference_does(arch: str, isa: str, tmp_path: Path) -> None:
    """A key that differs in its last bit may round to the next step, so floats are not compared one by one."""
    path = tiny_model(arch, tmp_path, "gguf")
    runs = [(NativeBackend(2, isa), "q8_0"), (ReferenceBackend(), "q8_0"), (ReferenceBackend(), "f32")]
    ours, defined, exact = (all_logits(_loaded(b, path, dtype), _table(), _ids(), [NUM_TOKENS]) for b, dtype in runs)
    away, rounding = (np.linalg.norm(logits - defined, axis=-1) for logits in (ours, exact))
    assert away.mean() < 0.2 * rounding.mean()
    assert np.median(rounding) < 0.03 * np.median(np.linalg.norm(exact, axis=-1))


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_quantised_models_stay_close_to_the_reference(type: TensorType, isa: str, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, "gguf", type=type, wide=True)
    native, reference = _loaded(NativeBackend(2, isa), path), _loaded(ReferenceBackend(), path)
    ours, defined = (all_logits(b, _table(), _ids(), [NUM_TOKENS]) for b in (native, reference))
    distance = np.linalg.norm(ours - defined, axis=-1) / np.linalg.norm(defined, axis=-1)
    assert distance.mean() < ROUNDING


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", DECODERS)
def test_chunks_threads_and_neighbours_change_no_bit(arch: str, dtype: str, isa: str, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, "gguf", type=TensorType.Q4_0)
    ids = _ids()
    whole = all_logits(_loaded(NativeBackend(2, isa), path, dtype), _table(), ids, [NUM_TOKENS])
    for threads, chunks in [(1, [NUM_TOKENS]), (2, [16] * 5 + [10]), (1, [1] * NUM_TOKENS), (2, [33, 1, 1, 55])]:
        backend = _loaded(NativeBackend(threads, isa), path, dtype)
        np.testing.assert_array_equal(all_logits(backend, _table(), ids, chunks), whole)
    np.testing.assert_array_equal(_beside_a_neighbour(_loaded(NativeBackend(2, isa), path, dtype), ids), whole)


def _beside_a_neighbour(backend: Backend, ids: list[int]) -> npt.NDArray[np.float32]:
    blocks = np.random.default_rng(1).permutation(32).astype(np.int32)
    tables, other = blocks[:16].reshape(2, 8), _ids(NUM_TOKENS, seed=4)
    logits = []
    for start in range(0, NUM_TOKENS, 45):
        spans = [(other[start : start + 45], start), (ids[start : start + 45], start)]
        logits.append(backend.logits(backend.forward(batch_of(spans, tables)))[45:])
    return np.concatenate(logits)


def test_long_contexts_split_over_threads_change_no_bit(isa: str, tmp_path: Path) -> None:
    """1,300 keys: the splits of a decode step go to different threads, those of a prompt do not."""
    path = tiny_model("llama", tmp_path, "gguf", type=TensorType.Q8_0)
    ids, table = _ids(1300), scattered_table(96, 96)
    results = []
    for threads, chunks in [(1, [1300]), (2, [1290] + [1] * 10)]:
        description = describe(open_weights(path))
        backend = NativeBackend(threads, isa)
        backend.load(description.spec, description.weights)
        layout = layout_of(description.spec, "f16")
        backend.reserve_kv(layout, 96 * layout.block_bytes)
        results.append(all_logits(backend, table, ids, chunks)[-10:])
    np.testing.assert_array_equal(*results)


def test_encoders_give_the_reference_states(isa: str, tmp_path: Path) -> None:
    assert "bert" in ARCHITECTURES
    path = tiny_model("bert", tmp_path, "safetensors")
    ids = _ids(40)
    native, reference = _loaded(NativeBackend(2, isa), path), _loaded(ReferenceBackend(), path)
    ours, defined = (b.forward(batch_of([(ids, 0)], _table())) for b in (native, reference))
    np.testing.assert_allclose(ours, defined, atol=2e-5 * float(np.abs(defined).max()))


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
def test_stale_values_in_reused_blocks_are_never_seen(dtype: str, isa: str, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, "gguf")
    backend = _loaded(NativeBackend(1, isa), path, dtype)
    fresh = all_logits(backend, _table(), _ids(20), [20])
    all_logits(backend, _table(), _ids(100, seed=9), [100])
    np.testing.assert_array_equal(all_logits(backend, _table(), _ids(20), [20]), fresh)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
def test_a_copied_block_answers_as_the_original(dtype: str, isa: str, tmp_path: Path) -> None:
    path, ids = tiny_model("llama", tmp_path, "gguf"), _ids(40)
    backend = _loaded(NativeBackend(1, isa), path, dtype)
    table = np.arange(8, dtype=np.int32)[None]
    whole = all_logits(backend, table, ids, [40])
    backend.copy_blocks([BlockCopy(i, 20 + i, 16) for i in range(2)])
    copied = backend.logits(backend.forward(batch_of([(ids[32:], 32)], table + 20)))
    np.testing.assert_array_equal(copied, whole[32:])


def test_batches_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    backend = _loaded(NativeBackend(1), tiny_model("llama", tmp_path, "gguf"))
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


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_sequences_that_share_blocks_get_the_bits_they_get_alone(arch: str, dtype: str, tmp_path: Path) -> None:
    """Nine continue one prompt of 130 tokens in their own blocks, a tenth another one; contexts differ."""
    native = _loaded(NativeBackend(2), tiny_model(arch, tmp_path, "gguf"), dtype)
    prompt = np.arange(9, dtype=np.int32)
    native.forward(batch_of([(_ids(130), 0)], prompt[None]))
    tables = np.full((10, 10), -1, np.int32)
    for i, table in enumerate(tables[:9]):
        table[:] = [*prompt[:8], 10 + 2 * i, 11 + 2 * i]
        native.forward(batch_of([(_ids(1 + i, seed=i), 128)], table[None]))
    tables[9, :2] = 30, 31
    native.forward(batch_of([(_ids(5), 0)], tables[9:]))
    rows = [([7 + i], 129 + i if i < 9 else 5) for i in range(10)]
    alone = np.concatenate([native.forward(batch_of([rows[i]], tables[i : i + 1])) for i in range(10)])
    together = native.forward(batch_of(rows, tables))
    assert np.array_equal(together, alone)
