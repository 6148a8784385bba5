"""The native backend on what diffusion asks of it: masks both ways, blocks in a canvas, shifted slots, kept keys.

Against the reference on floats, and against itself bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import Batch, Keep
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.config import CPU_KV_DTYPES
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.diffusion_models import DIFFUSION, MASK_ID, tiny_diffusion
from tests.running import all_logits, batch_of, layout_of
from tests.tiny_models import VOCAB

Float32 = npt.NDArray[np.float32]
Make = Callable[[], Backend]

NUM_BLOCKS = 40
LENGTH = 90  # past one tile of 64 keys
START, END = 40, 72  # of the active block
TABLE = np.random.default_rng(0).permutation(NUM_BLOCKS)[:24].astype(np.int32)
OWN, KEPT, OTHER = TABLE[:8], TABLE[8:16], TABLE[16:]


def canvas(length: int = LENGTH, seed: int = 3) -> list[int]:
    ids = [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, length)]
    return ids[:START] + [MASK_ID] * (length - START)


def loaded(backend: Backend, path: Path, dtype: str = "f32") -> Backend:
    description = describe(open_weights(path))
    backend.load(description.spec, description.weights)
    layout = layout_of(description.spec, dtype)
    backend.reserve_kv(layout, NUM_BLOCKS * layout.block_bytes)
    return backend


@pytest.fixture(params=_native.isa_names())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def close(ours: Float32, defined: Float32) -> None:
    np.testing.assert_allclose(ours, defined, atol=2e-5 * max(1.0, float(np.abs(defined).max())))


def logits_of(backend: Backend, batch: Batch) -> Float32:
    return backend.logits(backend.forward(batch))


@pytest.mark.parametrize("arch", DIFFUSION)
def test_a_canvas_gives_the_reference_logits(arch: str, isa: str, tmp_path: Path) -> None:
    path = tiny_diffusion(arch, tmp_path, "gguf")
    native, reference = loaded(NativeBackend(2, isa), path), loaded(ReferenceBackend(), path)
    close(*(all_logits(backend, OWN[None], canvas(), [LENGTH]) for backend in (native, reference)))


@pytest.mark.parametrize("arch", DIFFUSION)
def test_a_block_is_computed_again_within_its_canvas(arch: str, isa: str, tmp_path: Path) -> None:
    path, changed = tiny_diffusion(arch, tmp_path, "gguf"), canvas(seed=8)
    results = []
    for backend in (loaded(NativeBackend(2, isa), path), loaded(ReferenceBackend(), path)):
        all_logits(backend, OWN[None], canvas(), [LENGTH])
        results.append(logits_of(backend, block_of(changed, OWN, LENGTH)))
    close(*results)


def block_of(ids: list[int], table: npt.NDArray[np.int32], context: int, shift: int = 0) -> Batch:
    """The active block alone, in a canvas that is cached already."""
    batch = batch_of([(ids[START:END], START)], table[None])
    shifts = np.array([shift], np.int32) if shift else None
    return replace(batch, context_lens=np.array([context], np.int32), slot_shifts=shifts)


def test_blocks_one_after_the_other_are_the_whole(isa: str, tmp_path: Path) -> None:
    """Causal between blocks: what comes later changes nothing, and no block needs the ones behind it."""
    backend = loaded(NativeBackend(2, isa), tiny_diffusion("sdar", tmp_path, "gguf", type=TensorType.Q8_0))
    whole = all_logits(backend, OWN[None], canvas(), [LENGTH])
    for chunks in ([4] * 22 + [2], [40, 32, 18], [64, 26 - 2, 2]):
        assert sum(chunks) == LENGTH
        np.testing.assert_array_equal(all_logits(backend, OTHER[None], canvas(), chunks), whole)


def refresh(keep: Keep) -> Batch:
    return replace(batch_of([(canvas(), 0)], OWN[None]), keep=(keep,))


def reuse(ids: list[int], keep: Keep) -> Batch:
    return block_of(ids, keep.table, keep.num_kept + END - START, START - keep.num_kept)


def keep_of(num_kept: int = 29, *, per_head: bool = True, pool_kernel: int = 3) -> Keep:
    return Keep(0, START, END, num_kept, KEPT, per_head, pool_kernel)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("arch", ["llada", "dream"])
def test_a_block_against_kept_keys_is_what_the_reference_says(
    arch: str, per_head: bool, isa: str, tmp_path: Path
) -> None:
    path = tiny_diffusion(arch, tmp_path, "gguf")
    native, reference = loaded(NativeBackend(2, isa), path), loaded(ReferenceBackend(), path)
    for num_kept, pool_kernel in [(1, 3), (29, 1), (29, 3), (41, 7), (LENGTH - (END - START), 3)]:
        keep, results = keep_of(num_kept, per_head=per_head, pool_kernel=pool_kernel), []
        for backend in (native, reference):
            refreshed = logits_of(backend, refresh(keep))
            results.append(np.concatenate([refreshed, logits_of(backend, reuse(canvas(seed=8), keep))]))
        close(*results)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
def test_keeping_everything_is_the_canvas_itself(dtype: str, isa: str, tmp_path: Path) -> None:
    """Kept keys are copied bit for bit; only the order of the sums differs, because the block comes last."""
    backend = loaded(NativeBackend(2, isa), tiny_diffusion("dream", tmp_path, "gguf"), dtype)
    keep = keep_of(LENGTH - (END - START))
    backend.forward(refresh(keep))
    whole = logits_of(backend, block_of(canvas(seed=8), OWN, LENGTH))
    close(logits_of(backend, reuse(canvas(seed=8), keep)), whole)


def test_keeping_by_head_and_for_all_heads_differ(tmp_path: Path) -> None:
    backend = loaded(NativeBackend(1), tiny_diffusion("llada", tmp_path, "gguf"))
    found = []
    for per_head in (True, False):
        keep = keep_of(per_head=per_head)
        backend.forward(refresh(keep))
        found.append(logits_of(backend, reuse(canvas(), keep)))
    assert np.abs(found[0] - found[1]).max() > 0.01


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", DIFFUSION)
def test_threads_and_neighbours_change_no_bit(arch: str, dtype: str, isa: str, tmp_path: Path) -> None:
    path = tiny_diffusion(arch, tmp_path, "gguf", type=TensorType.Q4_0)
    alone = loaded(NativeBackend(1, isa), path, dtype)
    keeps = () if arch == "sdar" else (keep_of(),)
    steps = [replace(refresh(keep_of()), keep=keeps), block_of(canvas(seed=8), OWN, LENGTH)]
    steps += [reuse(canvas(seed=9), keep) for keep in keeps]
    expected = [logits_of(alone, step) for step in steps]
    crowded = loaded(NativeBackend(2, isa), path, dtype)
    for step, logits in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(logits_of(crowded, beside_a_neighbour(step))[-len(step.token_ids) :], logits)


def beside_a_neighbour(step: Batch) -> Batch:
    """The same step as the second sequence of a batch."""
    first = batch_of([(canvas(50, seed=7), 0)], OTHER[None])
    shifts = np.zeros(1, np.int32) if step.slot_shifts is None else step.slot_shifts
    return Batch(
        np.concatenate([first.token_ids, step.token_ids]),
        np.concatenate([first.positions, step.positions]),
        np.array([0, 50, 50 + len(step.token_ids)], np.int32),
        np.concatenate([first.context_lens, step.context_lens]),
        np.concatenate([first.block_tables, step.block_tables]),
        np.arange(50 + len(step.token_ids), dtype=np.int32),
        np.concatenate([np.zeros(1, np.int32), shifts]),
        tuple(replace(keep, sequence=1) for keep in step.keep),
    )


def test_a_passage_keeps_what_a_step_keeps(isa: str, tmp_path: Path) -> None:
    path, keep = tiny_diffusion("llada", tmp_path, "gguf"), keep_of()
    found = []
    for in_pieces in (False, True):
        backend = loaded(NativeBackend(2, isa), path)
        if in_pieces:
            passage = backend.begin(refresh(keep))
            while passage.advance(0.0) is None:
                pass
        else:
            backend.forward(refresh(keep))
        found.append(logits_of(backend, reuse(canvas(), keep)))
    np.testing.assert_array_equal(*found)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    backend = loaded(NativeBackend(1), tiny_diffusion("llada", tmp_path, "gguf"))
    good = keep_of()
    for message, bad in [
        ("sequence", replace(good, sequence=1)),
        ("computed in the same step", replace(good, block_end=LENGTH + 1)),
        ("computed in the same step", replace(good, block_start=END)),
        ("more than the keys", replace(good, num_kept=LENGTH - 31)),
        ("more than the keys", replace(good, num_kept=-1)),
        ("odd", replace(good, pool_kernel=2)),
        ("odd", replace(good, pool_kernel=-1)),
        ("shorter", replace(good, table=KEPT[:1])),
        ("outside the cache", replace(good, table=KEPT + NUM_BLOCKS)),
        ("of the sequence itself", replace(good, table=OWN)),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.forward(refresh(bad))
    shifted = replace(refresh(good), slot_shifts=np.array([1], np.int32))
    with pytest.raises(ValueError, match="slot_shifts"):
        backend.forward(shifted)
    with pytest.raises(ValueError, match="do not fit together"):
        backend.forward(replace(shifted, slot_shifts=np.zeros(2, np.int32)))
    with pytest.raises(ValueError, match="cover"):
        backend.forward(block_of(canvas(), KEPT, 29 + END - START - 1, START - 29))
    backend.forward(refresh(good))
