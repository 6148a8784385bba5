"""A second model that guesses: its own backend and its own KV cache, which follows the requests' tokens.

What it holds of a request is compared with the tokens that were chosen, and cut back to what they have in common. A
guess is sampled with the parameters and the random numbers of its position, as the large model will sample there, so
that models that agree choose alike at any temperature. Knows nothing of how many guesses are worth it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvarn.backends.batch import NO_TOKEN, Batch, RowSampling, SampleRows, UInt32
from kvarn.backends.protocol import Backend, Hidden
from kvarn.engine.scheduling.plan import pad_tables
from kvarn.kv.cache import KVCache
from kvarn.request import Clock, Request

CHUNK = 32  # rows of a text that are read at once
MAX_UNREAD = 16  # rows that a first guess may read beside its own


@dataclass(slots=True)
class DraftSequence:
    """What the draft model has read of one request."""

    token_ids: list[int] = field(default_factory=list)  # chosen ones and guesses behind them
    num_sure: int = 0  # of them that are known to be the request's


class CachedDraftModel:
    """Follows the requests of one engine; used by the engine's thread alone."""

    reads_states = False

    def __init__(
        self, backend: Backend, kv: KVCache, vocab_size: int, context: int, *, clock: Clock = time.perf_counter
    ) -> None:
        self.kv = kv
        self._backend = backend
        self._vocab_size = vocab_size
        self._context = context
        self._clock = clock
        self._sequences: dict[str, DraftSequence] = {}  # the least recently used first

    @property
    def num_held(self) -> dict[str, int]:
        """Tokens that it has read of each request, guesses among them."""
        return {name: len(sequence.token_ids) for name, sequence in self._sequences.items()}

    def prepare(self, requests: Sequence[Request], seconds: float) -> list[Request]:
        until, wanted, ready = self._clock() + seconds, {request.id for request in requests}, []
        for request in requests:
            if request.sampling is None or not self._can_hold(request):
                continue
            self._align(request)
            while len(left := self._unread(request)) > MAX_UNREAD and self._clock() < until:
                if not self._extend(request.id, min(CHUNK, len(left) - 1), wanted):
                    break
                self._forward({request.id: left[: min(CHUNK, len(left) - 1)]})
                self._sequences[request.id].num_sure = self.kv.num_tokens(request.id)
            if len(left) <= MAX_UNREAD:
                ready.append(request)
        return ready

    def draft(self, requests: Sequence[Request], depth: int) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = {request.id: [] for request in requests}
        wanted, live = set(found), list(requests)
        for _ in range(depth):
            params = {request.id: self._params(request, found[request.id]) for request in live}
            rows = {one.id: self._unread(one, found[one.id]) for one in live if params[one.id] is not None}
            rows = {name: ids for name, ids in rows.items() if self._extend(name, len(ids), wanted)}
            if not rows:
                break
            chosen = self._choose(self._forward(rows), [row for name in rows if (row := params[name]) is not None])
            for name, token_id in zip(rows, chosen, strict=True):
                if token_id != NO_TOKEN:
                    found[name].append(token_id)
            said = {name for name, token_id in zip(rows, chosen, strict=True) if token_id != NO_TOKEN}
            live = [one for one in live if one.id in said and self._can_hold(one, len(found[one.id]))]
        return found

    def release(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        self.kv.release(request_id)

    def close(self) -> None:
        self._backend.close()

    def _can_hold(self, request: Request, num_more: int = 0) -> bool:
        """Whether the request fits, and all its tokens are some of this model; both were checked but for padding."""
        num_tokens = len(request.token_ids)
        sequence = self._sequences.get(request.id)
        new = request.token_ids[0 if sequence is None else min(sequence.num_sure, num_tokens) :]
        return num_tokens + num_more < self._context and max(new, default=0) < self._vocab_size

    def _align(self, request: Request) -> None:
        """Forget guesses that were wrong; one token at least is left to read."""
        sequence = self._sequences.pop(request.id, None) or DraftSequence()
        self._sequences[request.id] = sequence  # at the end: the one that was used last
        held, tokens = sequence.token_ids, request.token_ids
        sure, most = min(sequence.num_sure, len(tokens) - 1), min(len(held), len(tokens) - 1)
        while sure < most and held[sure] == tokens[sure]:
            sure += 1
        sequence.num_sure = sure
        if sure < len(held):
            del held[sure:]
            self.kv.trim(request.id, sure)

    def _unread(self, request: Request, guesses: Sequence[int] = ()) -> list[int]:
        num_read = len(self._sequences[request.id].token_ids)
        return [*request.token_ids[num_read:], *guesses[max(0, num_read - len(request.token_ids)) :]]

    def _extend(self, name: str, num_rows: int, wanted: Collection[str]) -> bool:
        """Make room in the cache, if need be by forgetting requests that nothing is guessed for now."""
        while self.kv.extend(name, num_rows) is None:
            idle = next((one for one in self._sequences if one not in wanted), None)
            if idle is None:
                return False
            self.release(idle)
        return True

    def _forward(self, rows: Mapping[str, Sequence[int]]) -> Hidden:
        """Read these tokens, for which there is room; the state of the last one of each."""
        lengths = np.array([len(token_ids) for token_ids in rows.values()], np.int32)
        ends = np.array([self.kv.num_tokens(name) for name in rows], np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        token_ids = np.concatenate([np.array(ids, np.int32) for ids in rows.values()])
        shifts = np.repeat(ends - lengths - starts[:-1], lengths)
        hidden = self._backend.forward(
            Batch(
                token_ids=token_ids,
                positions=np.arange(len(token_ids), dtype=np.int32) + shifts.astype(np.int32),
                row_starts=starts,
                context_lens=ends,
                block_tables=pad_tables([self.kv.block_ids(name) for name in rows]),
                output_rows=starts[1:] - 1,
            )
        )
        for name, ids in rows.items():
            self._sequences[name].token_ids += ids
        return hidden

    def _choose(self, hidden: Hidden, params: Sequence[RowSampling]) -> list[int]:
        rows = SampleRows(np.arange(len(params), dtype=np.int32), tuple(params))
        return [int(token_id) for token_id in self._backend.sample(hidden, rows).token_ids]

    def _params(self, request: Request, guesses: Sequence[int]) -> RowSampling | None:
        """What the choice behind these guesses depends on; None: nothing can follow them."""
        try:
            return fitted(request.sampling.rows(request, guesses)[-1], self._vocab_size)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the constraint has ended; a panic of a library in Rust is no Exception
            return None


def fitted(row: RowSampling, vocab_size: int) -> RowSampling:
    """The same choice from logits of another length: padding differs between models of one vocabulary."""
    biased, seen = row.bias_ids < vocab_size, row.seen_ids < vocab_size
    return row.at(
        row.position,
        bias_ids=row.bias_ids[biased],
        bias_values=row.bias_values[biased],
        seen_ids=row.seen_ids[seen],
        seen_counts=row.seen_counts[seen],
        mask=None if row.mask is None else _fitted_mask(row.mask, vocab_size),
    )


def _fitted_mask(mask: UInt32, vocab_size: int) -> UInt32:
    num_words = -(-vocab_size // 32)
    return mask[:num_words] if len(mask) >= num_words else np.pad(mask, (0, num_words - len(mask)))
