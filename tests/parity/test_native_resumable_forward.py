"""A batch that goes through the native core in pieces, with other batches in between, gives the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.native.backend import NativeBackend
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.running import batch_of, layout_of
from tests.tiny_models import VOCAB, tiny_model

NUM_BLOCKS = 80
TABLE = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
OWN, OTHER = TABLE[:40], TABLE[40:]
PROMPT = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 600)]  # attention takes several pieces
SPLIT = 110  # two chunks; the second looks back at the first


def loaded(path: Path, threads: int) -> NativeBackend:
    description = describe(open_weights(path))
    backend = NativeBackend(threads)
    backend.load(description.spec, description.weights)
    layout = layout_of(description.spec, "f16")
    backend.reserve_kv(layout, NUM_BLOCKS * layout.block_bytes)
    return backend


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("type", [TensorType.F32, TensorType.Q4_0])
def test_a_chunk_in_pieces_beside_others_gives_the_same_bits(arch: str, type: TensorType, tmp_path: Path) -> None:
    path = tiny_model(arch, tmp_path, "gguf", type=type)
    chunks = [batch_of([(PROMPT[:SPLIT], 0)], OWN[None]), batch_of([(PROMPT[SPLIT:], SPLIT)], OWN[None])]
    whole = loaded(path, 1)
    expected = [whole.forward(chunk) for chunk in chunks]
    pieces, counts = loaded(path, 2), []
    for chunk, hidden in zip(chunks, expected, strict=True):
        passage, found, num_pieces, position = pieces.begin(chunk), None, 0, 0
        while (found := passage.advance(0.0)) is None:
            pieces.forward(batch_of([([PROMPT[position % 50]], position)], OTHER[None]))
            num_pieces, position = num_pieces + 1, position + 1
        np.testing.assert_array_equal(found, hidden)
        counts.append(num_pieces)
        assert passage.piece_s > 0
    assert counts[1] > counts[0] > 1  # attention of many rows to many keys is cut


def test_time_that_is_granted_lets_several_pieces_through_at_once(tmp_path: Path) -> None:
    backend = loaded(tiny_model("llama", tmp_path, "gguf"), 1)
    passage = backend.begin(batch_of([(PROMPT, 0)], OWN[None]))
    assert passage.advance(3600.0) is not None
