"""Where a model admits a scale for each channel: what writes the channels is divided by it, what reads them multiplied.

    attn_norm -> attn_q, attn_k, attn_v      ffn_norm -> ffn_gate, ffn_up
    attn_v -> attn_output                    ffn_up -> ffn_down, where a gate multiplies them
Biases of what writes are divided, too; heads that share keys and values share their scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec
from kvarn.quantization.imatrix import ImportanceMatrix, InputStatistics

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Fold:
    """writers: tensors whose rows, or values, are the channels; readers: matrices whose columns are. shares: how many
    columns of the readers lie on each run of `run` channels (query heads of one KV head), 1 otherwise."""

    layer: int
    input: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    channels: int
    shares: int = 1
    run: int = 1

    def of_columns(self, scales: Float32) -> Float32:
        """One scale for each column of the readers."""
        return np.repeat(scales.reshape(-1, 1, self.run), self.shares, axis=1).reshape(-1)

    def of_channels(self, columns: Float32) -> Float32:
        """The mean over the columns that share a channel."""
        means: Float32 = columns.reshape(-1, self.shares, self.run).mean(axis=1).reshape(-1)
        return means


def folds(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> Iterator[Fold]:
    """All folds that a file's tensors admit, layer by layer; matrices that the file fuses (phi3's) admit none."""
    for layer, block in enumerate(spec.blocks):
        is_shared = block.placement == "parallel" and f"blk.{layer}.ffn_norm.weight" not in tensors
        for fold in _of_block(spec, layer, block, norm_is_shared=is_shared or block.state is not None):
            writers = tuple(name for name in fold.writers if name in tensors)
            fits = all(tensors[name].shape[0] == fold.channels for name in writers)
            columns = fold.channels * fold.shares
            reads = all(name in tensors and tensors[name].shape[-1] == columns for name in fold.readers)
            if writers and fits and reads:
                yield replace(fold, writers=writers)


def _of_block(spec: ModelSpec, layer: int, block: Block, *, norm_is_shared: bool) -> Iterator[Fold]:
    """norm_is_shared: what attention reads, a feed-forward or a state beside it reads, too."""
    ffn = block.feed_forward

    def named(*kinds: str) -> tuple[str, ...]:
        return tuple(f"blk.{layer}.{kind}" for kind in kinds)

    own_norms = block.placement != "residual" and block.laurel is None  # else norms write into what others read, too
    if isinstance(block.mixer, Attention):  # what else mixes tokens is left alone
        if own_norms and not norm_is_shared:
            norm, readers = named("attn_norm.weight", "attn_norm.bias"), ("attn_q", "attn_k", "attn_v")
            yield Fold(layer, "qkv", norm, named(*(f"{kind}.weight" for kind in readers)), spec.width)
        yield from _of_values(layer, block.mixer)
    if isinstance(ffn, FeedForward) and ffn.gated:
        if own_norms:
            norm = named("ffn_norm.weight", "ffn_norm.bias")
            yield Fold(layer, "ffn_in", norm, named("ffn_gate.weight", "ffn_up.weight"), spec.width)
        up = named("ffn_up.weight", "ffn_up.bias")  # it is linear, whatever its gate is
        yield Fold(layer, "ffn_down", up, named("ffn_down.weight"), ffn.hidden)


def _of_values(layer: int, attention: Attention) -> Iterator[Fold]:
    if attention.value_norm_eps is None and attention.kv_source is None:  # a norm would undo it
        writers = f"blk.{layer}.attn_v.weight", f"blk.{layer}.attn_v.bias"
        shares, channels = attention.num_heads // attention.num_kv_heads, attention.num_kv_heads * attention.head_dim
        readers = (f"blk.{layer}.attn_output.weight",)
        yield Fold(layer, "attention_output", writers, readers, channels, shares, attention.head_dim)


class FoldedWeights(WeightProxy):
    """A source with scales folded in; what they touch is F32."""

    def __init__(self, source: WeightSource, scales: Mapping[Fold, Float32]) -> None:
        self._rows: dict[str, Float32] = {}
        self.columns: dict[str, Float32] = {}
        for fold, found in scales.items():
            self._rows |= dict.fromkeys(fold.writers, found)
            self.columns |= dict.fromkeys(fold.readers, fold.of_columns(found))
        touched = {*self._rows, *self.columns}
        super().__init__(source, {name: replace(source.tensors[name], type=TensorType.F32) for name in touched})

    def _changed_array(self, name: str) -> Float32:
        values = self._source.array(name).astype(np.float32)
        if name in self.columns:
            values *= self.columns[name]
        if name in self._rows:
            values /= self._rows[name] if values.ndim == 1 else self._rows[name][:, None]
        return values

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self.array(name)).reshape(-1).view(np.uint8)


def folded_imatrix(matrix: ImportanceMatrix, weights: FoldedWeights) -> ImportanceMatrix:
    """What the matrices read after the fold: inputs divided by the scales."""
    entries = dict(matrix.entries)
    for name, scale in weights.columns.items():
        if name in entries:
            found = entries[name]
            entries[name] = InputStatistics((found.sum_squares / np.square(scale)).astype(np.float32), found.counts)
    return replace(matrix, entries=entries)
