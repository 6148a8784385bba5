"""The layer of a model's own file that guesses (MTP): fed with the model's states, with a small KV cache of its own.

It reads the state of every position that the model computes, together with the token behind it, and guesses on from
the last. Where states are missing, as behind a prefix that was cached, it begins with those that come: positions are
counted from there. A guess is sampled by the model's own head with the parameters and random numbers of its position.
Knows nothing of how many guesses are worth it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import NO_TOKEN, Batch, Float32, RowSampling, SampleRows
from kvarn.backends.protocol import Hidden, JoiningBackend
from kvarn.engine.scheduling.plan import pad_tables
from kvarn.kv.cache import KVCache
from kvarn.request import Request

MAX_UNREAD = 32  # states that wait for the next guess; more are read at once
MAX_ROWS = 256  # that are read at once


@dataclass(slots=True)
class LayerSequence:
    """What the layer has of one request: the states of positions first .. end."""

    first: int
    unread: Float32  # (rows, width)  states of the last positions
    num_read: int = 0  # rows in the cache, of the states before those

    @property
    def end(self) -> int:
        return self.first + self.num_read + len(self.unread)


class CachedDraftLayer:
    """Follows the requests of one engine; used by the engine's thread alone. model: whose states it reads."""

    reads_states = True

    def __init__(self, layer: JoiningBackend, model: JoiningBackend, kv: KVCache, context: int) -> None:
        self.kv = kv
        self._layer = layer
        self._model = model
        self._context = context
        self._sequences: dict[str, LayerSequence] = {}  # the least recently used first

    @property
    def num_held(self) -> dict[str, int]:
        """Rows of each request in the cache."""
        return {name: sequence.num_read for name, sequence in self._sequences.items() if sequence.num_read}

    def take_states(self, request: Request, start: int, states: Float32) -> None:
        """States of the positions from start on; those that are known already are left out."""
        sequence = self._sequences.pop(request.id, None)
        if sequence is None or start > sequence.end:
            self.kv.release(request.id)
            sequence = LayerSequence(start, states[:0])
        self._sequences[request.id] = sequence  # at the end: the one that was used last
        new = states[sequence.end - start :]
        sequence.unread = np.concatenate([sequence.unread, new])  # a copy: the others belong to the step
        if len(sequence.unread) > MAX_UNREAD:
            self._read_ahead(request, sequence)

    def prepare(self, requests: Sequence[Request], seconds: float) -> list[Request]:  # noqa: ARG002 - all is read
        """Those of which it has the last state."""
        return [one for one in requests if one.sampling is not None and self._has_last_state(one)]

    def draft(self, requests: Sequence[Request], depth: int) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = {request.id: [] for request in requests}
        wanted, live, states = set(found), {request.id: request for request in requests}, dict[str, Float32]()
        for _ in range(depth):
            params = {name: row for name, one in live.items() if (row := _params(one, found[name])) is not None}
            rows = {name: self._next_rows(live[name], found[name], states.get(name)) for name in params}
            rows = {name: one for name, one in rows.items() if self._extend(name, len(one), wanted)}
            if not rows:
                break
            hidden = self._forward(rows)
            chosen = self._choose(hidden, [params[name] for name in rows])
            states = dict(zip(rows, np.asarray(hidden)[:, None], strict=True))
            for name, token_id in zip(rows, chosen, strict=True):
                self._mark_read(name)
                if token_id == NO_TOKEN:
                    del live[name]
                else:
                    found[name].append(token_id)
            live = {name: one for name, one in live.items() if name in rows}
        for name in found:
            self._forget_guesses(name)
        return found

    def release(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        self.kv.release(request_id)

    def close(self) -> None:
        self._layer.close()

    def _has_last_state(self, request: Request) -> bool:
        sequence = self._sequences.get(request.id)
        is_whole = sequence is not None and sequence.end == len(request.token_ids) - 1 and len(sequence.unread) > 0
        return is_whole and len(request.token_ids) < self._context

    def _read_ahead(self, request: Request, sequence: LayerSequence) -> None:
        """Read the states whose next token is known; what does not fit into the cache is forgotten, and all before."""
        while (count := min(self._num_readable(request, sequence), MAX_ROWS)) > 0:
            if not self._extend(request.id, count, {request.id}):
                self.kv.release(request.id)
                sequence.first, sequence.num_read = sequence.first + sequence.num_read + count, 0
                sequence.unread = sequence.unread[count:]
                continue
            at = sequence.first + sequence.num_read
            tokens = request.token_ids[at + 1 : at + 1 + count]
            self._forward({request.id: self._joined(tokens, sequence.unread[:count])}, wants_states=False)
            sequence.unread, sequence.num_read = sequence.unread[count:], sequence.num_read + count

    def _num_readable(self, request: Request, sequence: LayerSequence) -> int:
        return min(len(sequence.unread), len(request.token_ids) - 1 - sequence.first - sequence.num_read)

    def _next_rows(self, request: Request, guesses: Sequence[int], state: Float32 | None) -> Float32:
        """The unread states with their tokens, or the layer's own state with its last guess."""
        if state is not None:
            return self._joined(guesses[-1:], state)
        unread = self._sequences[request.id].unread
        return self._joined(request.token_ids[-len(unread) :], unread)

    def _joined(self, token_ids: Sequence[int], states: Float32) -> Float32:
        return np.concatenate([self._model.embed_tokens(np.array(token_ids, np.int32)), states], axis=1)

    def _mark_read(self, name: str) -> None:
        sequence = self._sequences[name]
        sequence.num_read, sequence.unread = sequence.num_read + len(sequence.unread), sequence.unread[:0]

    def _forget_guesses(self, name: str) -> None:
        """Rows of its own states: the model's own come with the next step."""
        num_read = self._sequences[name].num_read
        if self.kv.num_tokens(name) > num_read:
            self.kv.trim(name, num_read)

    def _extend(self, name: str, num_rows: int, wanted: Collection[str]) -> bool:
        """Make room in the cache, if need be by forgetting requests that nothing is guessed for now."""
        while self.kv.extend(name, num_rows) is None:
            idle = next((one for one in self._sequences if one not in wanted and self._sequences[one].num_read), None)
            if idle is None:
                return False
            self.release(idle)
        return True

    def _forward(self, rows: Mapping[str, Float32], *, wants_states: bool = True) -> Hidden:
        """Read rows of embeddings and states, for which there is room; the layer's state behind the last of each."""
        lengths = np.array([len(one) for one in rows.values()], np.int32)
        ends = np.array([self.kv.num_tokens(name) for name in rows], np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        shifts = np.repeat(ends - lengths - starts[:-1], lengths)
        return self._layer.forward(
            Batch(
                token_ids=np.zeros(starts[-1], np.int32),
                positions=np.arange(starts[-1], dtype=np.int32) + shifts.astype(np.int32),
                row_starts=starts,
                context_lens=ends,
                block_tables=pad_tables([self.kv.block_ids(name) for name in rows]),
                output_rows=starts[1:] - 1 if wants_states else starts[:0],
                inputs=np.concatenate(list(rows.values())),
            )
        )

    def _choose(self, hidden: Hidden, params: Sequence[RowSampling]) -> list[int]:
        rows = SampleRows(np.arange(len(params), dtype=np.int32), tuple(params))
        return [int(token_id) for token_id in self._model.sample(hidden, rows).token_ids]


def _params(request: Request, guesses: Sequence[int]) -> RowSampling | None:
    """What the choice behind these guesses depends on; None: nothing can follow them."""
    try:
        row: RowSampling = request.sampling.rows(request, guesses)[-1]
        return row
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the constraint has ended; a panic of a library in Rust is no Exception
        return None
