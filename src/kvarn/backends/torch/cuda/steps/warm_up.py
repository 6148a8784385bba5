"""Steps that are computed before the first request, so that everything is compiled, chosen and captured by then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvarn.backends.batch import Batch, StateSlots
from kvarn.backends.torch.cuda.attention import KEY_TILE
from kvarn.backends.torch.cuda.ops import BUCKETS
from kvarn.backends.torch.cuda.steps.graphs import (
    DENOISING_OUTPUTS,
    DENOISING_ROWS,
    FEW_SEQUENCES,
    OUTPUTS,
    PROMPT_ROWS,
    prompt_rows,
)

DEEP = 4096  # context of the deepest step that is captured
DENOISING_BLOCK = 32  # the usual length of a block


def warm_up_batches(block_size: int, num_blocks: int, max_context: int, max_rows: int = 0) -> list[Batch]:
    """Steps for which everything is compiled that will be met, over the first blocks."""
    prompts = [_batch(1, 0, rows, block_size) for rows in (*PROMPT_ROWS, 2 * PROMPT_ROWS[-1])]
    prompts += [_batch(1, DEEP, PROMPT_ROWS[0], block_size)]
    captured, crowd = prompt_rows(max_rows), 2 * OUTPUTS[0]
    prompts += [_batch(crowd, 0, rows // crowd, block_size) for rows in captured]
    prompts += [_batch(FEW_SEQUENCES, 0, rows // FEW_SEQUENCES, block_size) for rows in captured[len(PROMPT_ROWS) :]]
    decodes = [_batch(count, 0, 1, block_size) for count in BUCKETS]
    depths = [KEY_TILE << doubled for doubled in range(DEEP.bit_length() - KEY_TILE.bit_length())]
    few = [count for count in BUCKETS if count <= FEW_SEQUENCES]
    decodes += [_batch(count, depth, 1, block_size) for depth in depths for count in few]
    return _fitting(prompts + decodes, num_blocks, max_context)


def with_groups(batch: Batch, num_states: int, num_window_blocks: int) -> Batch:
    """The same batch with slots for states and with blocks of windows, where a model has them: what is written there,
    nobody has read yet."""
    count, empty = len(batch.context_lens), np.empty(0, np.int32)
    if num_window_blocks:
        batch = replace(batch, window_tables=batch.block_tables % num_window_blocks)
    if not num_states:
        return batch
    written = np.arange(count, dtype=np.int32) % num_states
    return replace(batch, states=StateSlots(np.full(count, -1, np.int32), written, empty, empty))


def denoising_warm_up_batches(block_size: int, num_blocks: int, max_context: int, _: int = 0) -> list[Batch]:
    """The same for a model that denoises: canvases, and the blocks of several requests."""
    block = DENOISING_BLOCK
    canvases = [_batch(1, 0, rows, block_size, block) for rows in (*DENOISING_ROWS, 2 * DENOISING_ROWS[-1])]
    blocks = [_batch(outputs // block, 0, block, block_size, block) for outputs in DENOISING_OUTPUTS]
    return _fitting(canvases + blocks, num_blocks, max_context)


def _fitting(batches: list[Batch], num_blocks: int, max_context: int) -> list[Batch]:
    short = [batch for batch in batches if int(batch.context_lens.max()) <= max_context]
    return [batch for batch in short if int(batch.block_tables.max()) < num_blocks]


def _batch(num_sequences: int, first: int, rows: int, block_size: int, num_wanted: int = 1) -> Batch:
    """Rows of several sequences from one position on, each with its own blocks, the last rows of each wanted."""
    ids = np.zeros(num_sequences * rows, np.int32)
    starts = np.arange(num_sequences + 1, dtype=np.int32) * rows
    per_sequence = -(-(first + rows) // block_size)
    tables = np.arange(num_sequences * per_sequence, dtype=np.int32).reshape(num_sequences, per_sequence)
    positions = np.tile(np.arange(first, first + rows, dtype=np.int32), num_sequences)
    contexts = np.full(num_sequences, first + rows, np.int32)
    wanted = (starts[1:, None] + np.arange(-num_wanted, 0)).reshape(-1).astype(np.int32)
    return Batch(ids, positions, starts, contexts, tables, wanted)
