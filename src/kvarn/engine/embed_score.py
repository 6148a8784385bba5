"""Whole passes over given tokens, beside the step loop: teacher-forced scores and embeddings.

Each borrows blocks of the cache for its own time and always gives them back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch
from kvarn.backends.protocol import Backend, Hidden
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling.plan import EntryStates, pad_tables, pad_window_tables, state_slots
from kvarn.errors import BackendError, CapacityError
from kvarn.kv.cache import KVCache
from kvarn.models.spec import Pooling

Float32 = npt.NDArray[np.float32]

_names = itertools.count(1)


def score_tokens(
    backend: Backend, kv: KVCache, token_ids: Sequence[int], chunk: int, beat: Callable[[], None] | None = None
) -> Float32:
    """Log-probability of each token given those before it, (n - 1), in chunks of bounded size; beat after each."""
    ids = np.asarray(token_ids, np.int32)
    scores = []
    with closing(token_states(backend, kv, ids[:-1], chunk)) as pieces:
        for number, hidden in enumerate(pieces):
            scores.append(backend.score(hidden, ids[1 + number * chunk : 1 + (number + 1) * chunk], 0).logprobs)
            if beat is not None:
                beat()
    result = np.concatenate(scores) if scores else np.empty(0, np.float32)
    if np.isnan(result).any():
        raise BackendError("the model's scores are not numbers; the model file may be damaged: fetch it again")
    return result


def score_request(engine: Engine, token_ids: Sequence[int]) -> Float32:
    """score_tokens on an engine, for EngineClient.compute."""
    return score_tokens(engine.backend, engine.kv, token_ids, engine.max_batch_tokens, engine.offer_turn)


def embed_request(engine: Engine, texts: Sequence[Sequence[int]], pooling: Pooling) -> Float32:
    """embed_group on an engine, for EngineClient.compute."""
    return embed_group(engine.backend, engine.kv, texts, pooling)


def token_states(
    backend: Backend, kv: KVCache, ids: npt.NDArray[np.int32], chunk: int, first: int = 0
) -> Generator[Hidden]:
    """The states of one sequence's tokens from `first` on, in pieces: those of every chunk tokens that has some."""
    name = f"states-{next(_names)}"
    try:
        for start in range(0, len(ids), chunk):
            batch = batch_of(kv, [name], [ids[start : start + chunk]], start)
            wanted = batch.output_rows[max(first - start, 0) :]
            hidden = backend.forward(replace(batch, output_rows=wanted))
            kv.advance(name, kv.num_tokens(name))
            if len(wanted):
                yield hidden
    finally:
        kv.release(name)


def embed_group(backend: Backend, kv: KVCache, texts: Sequence[Sequence[int]], pooling: Pooling) -> Float32:
    """One vector per text, (n, width), in one batch."""
    names = [f"embed-{next(_names)}" for _ in texts]
    try:
        batch = batch_of(kv, names, [np.asarray(ids, np.int32) for ids in texts], 0)
        vectors = backend.pool(backend.forward(batch), batch.row_starts, pooling)
    finally:
        for name in names:
            kv.release(name)
    if not np.isfinite(vectors).all():
        raise BackendError("the embedding is not finite; the model file may be damaged: fetch it again")
    return vectors


def groups(kv: KVCache, texts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Consecutive texts that fit into one batch and into the cache together."""
    group: list[Sequence[int]] = []
    num_tokens = num_blocks = 0
    for ids in texts:
        blocks = kv.blocks_for(len(ids))
        is_full = num_tokens + len(ids) > max_tokens or num_blocks + blocks > kv.num_blocks
        if group and (is_full or kv.states is not None):  # one sequence has slots beside those that run
            yield group
            group, num_tokens, num_blocks = [], 0, 0
        group.append(ids)
        num_tokens += len(ids)
        num_blocks += blocks
    if group:
        yield group


def batch_of(kv: KVCache, names: Sequence[str], parts: Sequence[npt.NDArray[np.int32]], start: int) -> Batch:
    """A batch of every row of every part, each part at positions from start on."""
    for name, part in zip(names, parts, strict=True):
        if start == 0 and kv.states is not None:
            kv.states.begin(name, (), 0, saves_any=False)
        if kv.extend(name, len(part)) is None:
            raise CapacityError(
                f"the KV cache has no room for {len(part):,} more tokens; raise kv_bytes= or wait", retry_after_s=1.0
            )
    lengths = [len(part) for part in parts]
    row_starts = _cumulative(lengths)
    return Batch(
        token_ids=np.concatenate(parts),
        positions=np.concatenate([np.arange(start, start + n, dtype=np.int32) for n in lengths]),
        row_starts=row_starts,
        context_lens=np.array([start + n for n in lengths], np.int32),
        block_tables=pad_tables([kv.block_ids(name) for name in names]),
        output_rows=np.arange(sum(lengths), dtype=np.int32),
        window_tables=pad_window_tables([kv.window_ids(name) for name in names]),
        states=state_slots(EntryStates.of(kv, names), row_starts),
    )


def _cumulative(lengths: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.array([0, *itertools.accumulate(lengths)], np.int32)
