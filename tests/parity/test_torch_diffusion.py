"""The torch backend on what diffusion asks of it: masks both ways, blocks in a canvas, shifted slots, kept keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.reference.backend import ReferenceBackend
from tests.diffusion_models import DIFFUSION, tiny_diffusion
from tests.parity.test_native_diffusion import (
    END,
    KEPT,
    LENGTH,
    NUM_BLOCKS,
    OTHER,
    OWN,
    START,
    beside_a_neighbour,
    block_of,
    canvas,
    close,
    keep_of,
    loaded,
    logits_of,
    refresh,
    reuse,
)
from tests.running import all_logits
from tests.torch_backend import torch_cpu


@pytest.mark.parametrize("arch", DIFFUSION)
def test_a_canvas_and_a_block_of_it_give_the_reference_logits(arch: str, tmp_path: Path) -> None:
    path, results = tiny_diffusion(arch, tmp_path, "gguf"), []
    for backend in (loaded(torch_cpu(), path), loaded(ReferenceBackend(), path)):
        whole = all_logits(backend, OWN[None], canvas(), [LENGTH])
        results.append(np.concatenate([whole, logits_of(backend, block_of(canvas(seed=8), OWN, LENGTH))]))
    close(*results)


def test_blocks_one_after_the_other_are_the_whole(tmp_path: Path) -> None:
    backend = loaded(torch_cpu(), tiny_diffusion("sdar", tmp_path, "gguf"))
    whole = all_logits(backend, OWN[None], canvas(), [LENGTH])
    for chunks in ([4] * 22 + [2], [40, 32, 18]):
        np.testing.assert_array_equal(all_logits(backend, OTHER[None], canvas(), chunks), whole)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("arch", ["llada", "dream"])
def test_a_block_against_kept_keys_is_what_the_reference_says(arch: str, per_head: bool, tmp_path: Path) -> None:
    path = tiny_diffusion(arch, tmp_path, "gguf")
    ours, reference = loaded(torch_cpu(), path), loaded(ReferenceBackend(), path)
    for num_kept, pool_kernel in [(1, 3), (29, 1), (29, 3), (41, 7), (LENGTH - (END - START), 3)]:
        keep, results = keep_of(num_kept, per_head=per_head, pool_kernel=pool_kernel), []
        for backend in (ours, reference):
            refreshed = logits_of(backend, refresh(keep))
            results.append(np.concatenate([refreshed, logits_of(backend, reuse(canvas(seed=8), keep))]))
        close(*results)


@pytest.mark.parametrize("arch", DIFFUSION)
def test_neighbours_change_no_bit(arch: str, tmp_path: Path) -> None:
    path = tiny_diffusion(arch, tmp_path, "gguf")
    keeps = () if arch == "sdar" else (keep_of(),)
    steps = [replace(refresh(keep_of()), keep=keeps), block_of(canvas(seed=8), OWN, LENGTH)]
    steps += [reuse(canvas(seed=9), keep) for keep in keeps]
    alone, crowded = (loaded(torch_cpu(threads), path, "f16") for threads in (1, 2))
    for step in steps:
        together = logits_of(crowded, beside_a_neighbour(step))[-len(step.token_ids) :]
        np.testing.assert_array_equal(together, logits_of(alone, step))


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    backend, good = loaded(torch_cpu(), tiny_diffusion("llada", tmp_path, "gguf")), keep_of()
    for message, bad in [
        ("sequence", replace(good, sequence=1)),
        ("computed in the same step", replace(good, block_end=LENGTH + 1)),
        ("computed in the same step", replace(good, block_start=END)),
        ("more than the keys", replace(good, num_kept=LENGTH - 31)),
        ("odd", replace(good, pool_kernel=2)),
        ("shorter", replace(good, table=KEPT[:1])),
        ("outside the cache", replace(good, table=KEPT + NUM_BLOCKS)),
        ("of the sequence itself", replace(good, table=OWN)),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.forward(refresh(bad))
    with pytest.raises(ValueError, match="slot_shifts"):
        backend.forward(replace(refresh(good), slot_shifts=np.array([1], np.int32)))
    with pytest.raises(ValueError, match="cover"):
        backend.forward(block_of(canvas(), KEPT, 29 + END - START - 1, START - 29))
    backend.forward(refresh(good))
