"""Run any backend by hand, without an engine: batches, scattered block tables, logits of every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, KVLayout, StateSlots
from kvarn.backends.protocol import Backend
from kvarn.models.recurrent import kv_layers, latent_layers, state_layers
from kvarn.models.spec import ModelSpec

Float32 = npt.NDArray[np.float32]
NUM_STATES = 101


def layout_of(spec: ModelSpec, dtype: str = "f32", block_size: int = 16) -> KVLayout:
    """The cache layout of a model."""
    states = state_layers(spec)
    num_states = NUM_STATES if states else 0
    return KVLayout(block_size, kv_layers(spec), dtype, states, num_states=num_states, latent=latent_layers(spec))


def batch_of(spans: Sequence[tuple[Sequence[int], int]], tables: npt.NDArray[np.int32]) -> Batch:
    """Make a batch of (tokens, first position) per sequence, with every row an output row.

    The slots of states follow from the first block of a sequence's table and its number of tokens.
    """
    lengths = [len(tokens) for tokens, _ in spans]
    ids = [token for tokens, _ in spans for token in tokens]
    positions = [first + i for tokens, first in spans for i in range(len(tokens))]
    ends = [first + len(tokens) for tokens, first in spans]
    starts = [0, *accumulate(lengths)]
    ids, positions, starts, ends = (np.asarray(v, np.int32) for v in (ids, positions, starts, ends))  # type: ignore[assignment]
    rows = np.arange(sum(lengths), dtype=np.int32)
    owners = 37 * (tables[:, 0] if tables.shape[1] else np.arange(len(spans)))
    starts_at = np.array([first for _, first in spans])
    read = np.where(starts_at > 0, (owners + starts_at) % NUM_STATES, -1).astype(np.int32)
    written = ((owners + ends) % NUM_STATES).astype(np.int32)
    states = StateSlots(read, written, np.empty(0, np.int32), np.empty(0, np.int32))
    return Batch(ids, positions, starts, ends, tables, rows, states=states)  # type: ignore[arg-type]


def scattered_table(num_blocks: int, wanted: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """A block table in no order at all, (1, wanted)."""
    return np.random.default_rng(seed).permutation(num_blocks)[None, :wanted].astype(np.int32)


def hidden_states(
    backend: Backend, table: npt.NDArray[np.int32], ids: Sequence[int], chunks: Sequence[int]
) -> list[object]:
    """Feed one sequence in chunks; the Hidden of each."""
    assert sum(chunks) == len(ids)
    starts = [0, *accumulate(chunks)][:-1]
    return [
        backend.forward(batch_of([(ids[start : start + length], start)], table))
        for start, length in zip(starts, chunks, strict=True)
    ]


def all_logits(backend: Backend, table: npt.NDArray[np.int32], ids: Sequence[int], chunks: Sequence[int]) -> Float32:
    """The logits after every token of one sequence, (tokens, vocabulary)."""
    return np.concatenate([backend.logits(hidden) for hidden in hidden_states(backend, table, ids, chunks)])
