"""What the engine passes to a backend: frozen, ragged, NumPy. Complete when constructed; nothing is filled in later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import AdapterUse
from kvarn.errors import ConfigError
from kvarn.models.memory_plan import kv_layer_bytes
from kvarn.sampling import sampler

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]

NO_TOKEN = sampler.NO_TOKEN


@dataclass(frozen=True, slots=True)
class Keep:
    """In this step, while every layer attends, pack the K and V that matter most to the active block into other blocks.

    Over keys k of the sequence (slots 0 .. context_len - 1, all positions unshifted in such a step) outside
    block_start .. block_end: score[h, k] = mean over the block's queries of q . k * scale, for GQA the max over the
    KV head's query heads; max-pooled over k with an odd kernel, stride 1 (over the sequence of outside keys in order
    of position); the num_kept largest, ties to the lower position, are copied in ascending order of position to slots
    0 .. num_kept - 1 of table. per_head: every KV head keeps its own; otherwise the score is summed over KV heads and
    all keep the same.
    """

    sequence: int  # index among the batch's sequences
    block_start: int  # the active block, positions
    block_end: int
    num_kept: int
    table: Int32  # destination block ids
    per_head: bool
    pool_kernel: int


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where the states of recurrent layers lie: one slot holds those of all layers after some token of a sequence.

    Sequence s begins with the state in read[s], -1: zeros, and leaves that behind its last token in written[s]; that
    behind row saved_rows[i] of the batch also goes to saved_slots[i]. No slot is read after it is written in a step,
    but by its own sequence.
    """

    read: Int32  # (S)
    written: Int32  # (S)
    saved_rows: Int32  # ascending
    saved_slots: Int32


Feedback = Any  # opaque, on the device: for every row of a canvas, what the next step of its denoising reads


@dataclass(frozen=True, slots=True)
class Canvases:
    """Of a model that denoises canvases of random tokens: sequence s has canvas rows from position starts[s] on, up to
    its last row, and those before it are text. No text row comes behind a canvas one."""

    starts: Int32  # (S); behind its last row where a sequence has none
    feedback: tuple[Feedback | None, ...]  # (S) what sample() gave for the last step; None: this is the first


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: S sequences, N tokens in all.

        token_ids     |a a a a|b|c c|     (N)  below 0: chosen_token(i), one that the device has and the host not yet
        positions     |0 1 2 3|9|4 5|     (N)  absolute; consecutive within a sequence
        row_starts    0       4 5   7     (S + 1)
        context_lens  4       10  6       (S)  cached tokens after this step
        block_tables  (S, widest)  block ids; -1 pads
        window_tables (S, widest)  the same for the layers that keep a window; -1 also where no row of this batch reads
        output_rows   rows of N whose hidden state is wanted, ascending
        slot_shifts   (S)  a token at position p lies in slot p - shift of its table; None: all 0

    context_lens counts slots. K and V of every token are written to the cache before any query reads it. With a
    bidirectional mask a query sees all slots 0 .. context_len - 1 of its sequence, whether or not this step wrote
    them; positions need not end at context_len (a block in the middle of a canvas).
    """

    token_ids: Int32
    positions: Int32
    row_starts: Int32
    context_lens: Int32
    block_tables: Int32
    output_rows: Int32
    slot_shifts: Int32 | None = None
    keep: tuple[Keep, ...] = ()
    window_tables: Int32 | None = None  # None where the layout has no window group
    states: StateSlots | None = None  # None where no layer has one, or every sequence is computed in one piece
    canvases: Canvases | None = None  # None where no sequence has any
    adapters: tuple[tuple[AdapterUse, ...], ...] = ()  # of each sequence, in the order they are added; (): none has any
    inputs: Float32 | None = None  # (N, 2 x width)  an embedding, then a state; for InputEmbedding.joined only


def chosen_token(row: int) -> int:
    """The id that stands for what row i of the last sample_later() chose. Its own inverse: 0 is -1, 1 is -2."""
    return -1 - row


@dataclass(frozen=True)  # no slots: at() copies one dict, a third of the time of copying as many slots
class RowSampling:
    """All that the choice of one token depends on.

    Order: mask, bias (logit_bias, DRY), penalties (repetition, then frequency and presence), temperature, top_k,
    typical_p, top_p, min_p, XTC, choice. temperature 0 takes the largest logit, ties to the lower id.
    Random numbers come from Philox 4x32-10 with key = seed and counter = (position, choice, purpose, draw).
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    seed: int = 0  # 0 .. 2**64 - 1
    choice: int = 0  # index among n choices of one request
    position: int = 0  # of the token being chosen
    draw: int = 0  # which draw at the same position, for repeated denoising steps
    cfg_scale: float = 0.0  # classifier-free guidance; needs a partner row
    bias_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    seen_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # distinct; prompt and output
    seen_counts: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # in the output; 0: prompt only
    mask: UInt32 | None = None  # bit i % 32 of word i // 32: token i may be chosen; None: all may

    def at(self, position: int, **changes: Any) -> RowSampling:
        """The same choice for another position: dataclasses.replace at a tenth of its time, for every row of a step."""
        row = object.__new__(RowSampling)
        row.__dict__.update(self.__dict__, position=position, **changes)
        return row


class RowsAt(Sequence[RowSampling]):
    """The same choices at other positions; each is made when somebody looks at it.

    base is one tuple for all steps of the same requests: what a backend makes of it holds for all of them.
    """

    def __init__(self, base: tuple[RowSampling, ...], positions: Int32) -> None:
        self.base = base
        self.positions = positions

    def __len__(self) -> int:
        return len(self.base)

    @overload
    def __getitem__(self, index: int) -> RowSampling: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RowSampling, ...]: ...

    def __getitem__(self, index: int | slice) -> RowSampling | tuple[RowSampling, ...]:
        return self._rows[index]

    def __iter__(self) -> Iterator[RowSampling]:
        return iter(self._rows)

    @cached_property
    def _rows(self) -> tuple[RowSampling, ...]:
        pairs = zip(self.base, self.positions.tolist(), strict=True)
        return tuple([row if row.temperature == 0.0 else row.at(position) for row, position in pairs])


@dataclass(frozen=True, slots=True)
class SampleRows:
    """rows[i] is an index into the Hidden's output rows; num_top alternatives (with want_logprobs) come beside it.

    partners[i] is the output row with the unconditional state of the same position, -1: none. With a partner the logits
    are Lu + (cfg_scale + 1) * (L - Lu) before everything else, log-probabilities included.
    """

    rows: Int32
    params: tuple[RowSampling, ...] | RowsAt
    num_top: int = 0
    want_logprobs: bool = False  # otherwise a backend may leave logprobs and entropy at 0
    partners: Int32 | None = None
    canvas_starts: Int32 | None = (
        None  # (C + 1): rows canvas_starts[i] .. canvas_starts[i + 1] are a canvas; None: none
    )
    unused_mask: UInt32 | None = None  # of sample_later(): ids that are never chosen, also in rows without a mask

    def with_unused_masked(self) -> SampleRows:
        """The same with that mask in every row that has none; a constraint's leaves those ids out already."""
        mask = self.unused_mask
        if mask is None:
            return self
        params = tuple([row if row.mask is not None else row.at(row.position, mask=mask) for row in self.params])
        return replace(self, params=params, unused_mask=None)


@dataclass(frozen=True, slots=True)
class CanvasScores:
    """Of the rows of a canvas: p = softmax(logits / temperature) after mask, bias and penalties, before top_k.

    feedback: the sum of p * token_embd * embedding scale over the vocabulary, for each row; as Canvases takes it.
    """

    best_ids: Int32  # (rows) of the largest p, ties to the lower id
    entropy: Float32  # (rows) of p, nats
    feedback: Feedback


@dataclass(frozen=True, slots=True)
class Sampled:
    """Log-probabilities are of the plain softmax of the logits, before bias, penalties and temperature."""

    token_ids: Int32  # (rows); NO_TOKEN where the logits were not finite, or the mask had no bit
    logprobs: Float32  # (rows)
    entropy: Float32  # (rows) nats
    top_ids: Int32  # (rows, num_top), most probable first, ties to the lower id
    top_logprobs: Float32  # (rows, num_top)
    late: tuple[int, ...] = ()  # rows of sample_later() settled when it was read: the next batch had another token
    canvases: tuple[CanvasScores, ...] = ()  # as SampleRows.canvas_starts asks for


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of given tokens, and the most probable ones beside them."""

    logprobs: Float32  # (rows)
    top_ids: Int32  # (rows, num_top)
    top_logprobs: Float32  # (rows, num_top)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy at least the first num_tokens of one block to another, all layers of the group."""

    source: int
    target: int
    num_tokens: int
    group: int = 0  # 0: blocks of block_tables, 1: of window_tables


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the paged cache: every block holds block_size tokens of every layer of its group.

    Layers named in windowed form a second group, with blocks and ids of its own; without any there is one group.
    """

    block_size: int
    layers: tuple[tuple[int, int], ...]  # (num_kv_heads, head_dim) per layer, (0, 0) where it has a state instead
    dtype: str = "f16"  # f16 | f32 | q8_0
    states: tuple[int, ...] = ()  # floats of a state per layer; beside the blocks, in slots of their own
    num_states: int = 0
    latent: tuple[bool, ...] = ()  # layers whose V is the first columns of K, and is not stored; empty: none
    windowed: tuple[bool, ...] = ()  # per layer; empty: none
    num_window_blocks: int = 0

    def __post_init__(self) -> None:
        if self.latent and self.dtype == "q8_0":
            raise ConfigError("kv_dtype is 'q8_0'; the model has latent attention, whose cache is f16 or f32")

    @property
    def value_dims(self) -> tuple[int, ...]:
        """What is stored of a head's V, by layer: 0 where it is a part of K."""
        latent = self.latent or (False,) * len(self.layers)
        return tuple(0 if is_latent else dim for (_, dim), is_latent in zip(self.layers, latent, strict=True))

    @property
    def token_bytes(self) -> int:
        """Of the layers that keep all."""
        return self._token_bytes(windowed=False)

    @property
    def block_bytes(self) -> int:
        """Rounded up to whole pages of 4 KiB, at least one."""
        return self._block_bytes(self.token_bytes)

    @property
    def window_block_bytes(self) -> int:
        """The same for the layers that keep a window."""
        return self._block_bytes(self._token_bytes(windowed=True))

    def is_windowed(self, layer: int) -> bool:
        return bool(self.windowed) and self.windowed[layer]

    def _token_bytes(self, *, windowed: bool) -> int:
        layer_bytes = kv_layer_bytes(self.layers, self.latent, self.dtype)
        return sum(size for i, size in enumerate(layer_bytes) if self.is_windowed(i) == windowed)

    def _block_bytes(self, token_bytes: int) -> int:
        return max(1, -(-self.block_size * token_bytes // 4096)) * 4096
