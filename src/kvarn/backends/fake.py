"""A backend without a model for unit tests: fast, deterministic, and sensitive to errors in the KV cache.

It stores token ids in the paged cache the way a real backend stores K and V, and the next token is a function of
what it reads back through the block table: a wrong table, position or stale block changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import LoraWeights
from kvarn.backends.batch import NO_TOKEN, Batch, BlockCopy, KVLayout, Sampled, SampleRows, Scored, chosen_token
from kvarn.backends.pooling import pool_rows
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import (
    Attention,
    Autoregressive,
    Block,
    Encoder,
    FeedForward,
    Head,
    InputEmbedding,
    ModelSpec,
    Norm,
    Pooling,
)
from kvarn.sampling.sampler import choose

Rule = Callable[[Sequence[int]], int]  # tokens so far -> the next one
Fault = Literal["nan"] | BaseException


def hashed(vocab_size: int) -> Rule:
    """A next token that depends on every token before it and its position."""

    def rule(tokens: Sequence[int]) -> int:
        state = 17
        for token in tokens:
            state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        return state % vocab_size

    return rule


def fake_spec(vocab_size: int = 256, context_length: int = 512, *, is_encoder: bool = False) -> ModelSpec:
    """The smallest valid spec."""
    norm = Norm("rms", 1e-5)
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, rope=None)
    return ModelSpec(
        architecture="fake",
        name="fake",
        width=8,
        vocab_size=vocab_size,
        context_length=context_length,
        embedding=InputEmbedding(),
        blocks=(Block(attention, FeedForward(8, "silu"), norm),),
        output_norm=norm,
        head=None if is_encoder else Head(tied=True),
        generation=Encoder("mean") if is_encoder else Autoregressive(),
    )


class FakeBackend:
    """A fault is an exception to raise, or "nan" logits.

    faults[k] strikes in the k-th forward (from 0), whatever its batch; poison[token_id] strikes whenever that token is
    computed. on_forward(batch, share) is called before every batch, or that share of the work on it: a test may advance
    simulated time there, and returns by how much.
    """

    name = "fake"
    min_prompt_rows = 1
    free_prompt_rows = 0
    progress = 0
    lost = None

    def __init__(
        self,
        vocab_size: int = 256,
        rule: Rule | None = None,
        faults: Mapping[int, Fault] | None = None,
        poison: Mapping[int, Fault] | None = None,
        on_forward: Callable[[Batch, float], float] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.rule = rule or hashed(vocab_size)
        self.faults = dict(faults or {})
        self.poison = dict(poison or {})
        self.on_forward = on_forward
        self.runs_ahead = False
        self.is_late: Callable[[], bool] = lambda: False  # the next step takes another token for one just chosen
        self.batch_sizes: list[int] = []  # tokens of each forward
        self.window = 0  # a query at p reads p - window and later through window_tables, where a batch has them
        self._cache = np.empty((0, 0), np.int32)  # (blocks, block_size)
        self._windows = np.empty((0, 0), np.int32)  # the same of the window group
        self._chosen = np.empty(0, np.int32)  # by the last sample_later()

    def unsupported(self, spec: ModelSpec) -> list[str]:  # noqa: ARG002
        return []

    def load(
        self,
        spec: ModelSpec,  # noqa: ARG002
        weights: WeightSource | None,  # noqa: ARG002
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if progress is not None:
            progress(1, 1)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        return weights

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        self._cache = np.full((budget_bytes // layout.block_bytes, layout.block_size), -1, np.int32)
        self._windows = np.full((layout.num_window_blocks, layout.block_size), -1, np.int32)
        return len(self._cache)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            cache = self._windows if copy.group else self._cache
            cache[copy.target, : copy.num_tokens] = cache[copy.source, : copy.num_tokens]

    def kernel_identity(self) -> str:
        return f"fake {self.vocab_size}"

    def num_block_bytes(self) -> int:
        return self._cache.shape[1] * self._cache.itemsize

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        content: npt.NDArray[np.uint8] = self._cache[block_id].copy().view(np.uint8)
        return content

    def write_block(self, block_id: int, content: npt.NDArray[np.uint8]) -> None:
        self._cache[block_id] = content.view(np.int32)

    def populate_blocks(self, count: int) -> None:
        """Do nothing: all is filled from the start."""

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        (self._windows if group else self._cache)[list(block_ids)] = -1

    def return_states(self, slots: Iterable[int]) -> None:
        """There are none."""

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits stand in for hidden states: (output rows, vocabulary)."""
        self.spend(batch, 1.0)
        return self.compute(batch)

    def spend(self, batch: Batch, share: float) -> float:
        """Advance simulated time; return the seconds."""
        return 0.0 if self.on_forward is None else self.on_forward(batch, share)

    def compute(self, batch: Batch) -> npt.NDArray[np.float32]:
        """forward() without the time it takes."""
        fault = self.faults.get(len(self.batch_sizes))
        self.batch_sizes.append(len(batch.token_ids))
        batch = self._with_chosen(batch)
        poison = [self.poison[token] for token in batch.token_ids.tolist() if token in self.poison]
        for struck in (fault, *poison):
            if isinstance(struck, BaseException):
                raise struck
        self.write(batch)
        sequence_of = _sequences(batch)
        rows = [self._logits(batch, int(row), int(sequence_of[row])) for row in batch.output_rows]
        logits = np.array(rows, np.float32).reshape(len(rows), self.vocab_size)
        return logits * np.float32("nan") if fault == "nan" else logits

    def begin(self, batch: Batch) -> FakeResumableForward:
        return FakeResumableForward(self, batch)

    def write(self, batch: Batch) -> None:
        """Write the batch's tokens to the cache, as a real backend writes K and V."""
        block_size = self._cache.shape[1]
        assert batch.window_tables is not None or not len(self._windows), "the batch has no window_tables"
        for cache, tables in ((self._cache, batch.block_tables), (self._windows, batch.window_tables)):
            if tables is not None:
                blocks = tables[_sequences(batch), batch.positions // block_size]
                assert (blocks >= 0).all(), "a position has no block"
                cache[blocks, batch.positions % block_size] = batch.token_ids

    def sample(self, hidden: npt.NDArray[np.float32], rows: SampleRows) -> Sampled:
        logits = hidden[rows.rows]
        pairs = zip(logits, rows.params, strict=True)
        token_ids = np.array(
            [NO_TOKEN if np.isnan(row).any() else choose(row, params) for row, params in pairs], np.int32
        )
        scored = self.score(logits, token_ids, rows.num_top)
        logprobs = _log_softmax(logits)
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
        return Sampled(token_ids, scored.logprobs, entropy, scored.top_ids, scored.top_logprobs)

    def sample_later(self, hidden: npt.NDArray[np.float32], rows: SampleRows) -> Callable[[], Sampled]:
        sampled = self.sample(hidden, rows.with_unused_masked())
        late = tuple([i for i in range(len(rows.rows)) if self.is_late()])
        self._chosen = np.maximum(sampled.token_ids, 0)
        self._chosen[list(late)] = 1
        return lambda: replace(sampled, late=late)

    def score(self, hidden: npt.NDArray[np.float32], targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        logprobs = _log_softmax(hidden)
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :num_top].astype(np.int32)
        chosen = np.take_along_axis(logprobs, targets[:, None].astype(np.int64), axis=1)[:, 0]
        return Scored(chosen, top_ids, np.take_along_axis(logprobs, top_ids.astype(np.int64), axis=1))

    def pool(
        self, hidden: npt.NDArray[np.float32], row_starts: npt.NDArray[np.int32], pooling: Pooling
    ) -> npt.NDArray[np.float32]:
        return pool_rows(hidden, row_starts, pooling)

    def logits(self, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return hidden

    def close(self) -> None:
        self._cache = np.empty((0, 0), np.int32)

    def _with_chosen(self, batch: Batch) -> Batch:
        """The batch with the tokens that the last one chose in their places."""
        ids = batch.token_ids
        if (ids >= 0).all():
            return batch
        chosen = [int(self._chosen[chosen_token(i)]) if i < 0 else i for i in ids.tolist()]
        return replace(batch, token_ids=np.array(chosen, np.int32))

    def _logits(self, batch: Batch, row: int, sequence: int) -> npt.NDArray[np.float32]:
        length = int(batch.positions[row]) + 1
        num_blocks = -(-length // self._cache.shape[1])
        tokens = self._cache[batch.block_tables[sequence, :num_blocks]].reshape(-1)[:length]
        if batch.window_tables is not None:
            seen = np.arange(max(0, length - 1 - self.window), length)
            blocks = batch.window_tables[sequence, seen // self._cache.shape[1]]
            assert (blocks >= 0).all(), "a position in the window has no block"
            tokens[seen] = self._windows[blocks, seen % self._cache.shape[1]]
        following = self.rule(tokens.tolist())
        logits: npt.NDArray[np.float32] = np.cos(np.arange(self.vocab_size) * 0.7 + following).astype(np.float32)
        logits[following] += 8.0
        if self.poison and any(self.poison.get(token) == "nan" for token in tokens.tolist()):
            logits[:] = np.nan
        return logits


class FakeResumableForward:
    """Writes to the cache in every piece, so that advancing after its blocks were freed corrupts other sequences.

    Without simulated time every advance() computes one piece.
    """

    num_pieces = 12

    def __init__(self, backend: FakeBackend, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        self._num_left = self.num_pieces
        self.piece_s = 0.0

    def advance(self, seconds: float) -> npt.NDArray[np.float32] | None:
        spent_s = 0.0
        while self._num_left > 0:
            self._backend.write(self._batch)
            self._num_left -= 1
            self.piece_s = self._backend.spend(self._batch, 1 / self.num_pieces)
            spent_s += self.piece_s
            if not spent_s + self.piece_s <= seconds or (self.piece_s == 0.0 and np.isfinite(seconds)):
                break
        return None if self._num_left else self._backend.compute(self._batch)


def _sequences(batch: Batch) -> npt.NDArray[np.int64]:
    """Which sequence each row belongs to."""
    return np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.row_starts))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
