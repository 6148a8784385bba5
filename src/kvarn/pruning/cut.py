"""What stays of a model: a Cut as data, and the source's weights seen through it.

Rows are taken as bytes. Columns, too, where whole blocks stay; otherwise the rest of a row is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.backends.native import _native
from kvarn.formats.stored_grids import has_grid
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.quantization.blocks import FLOATS, Bytes, Float32, requantized
from kvarn.quantization.gptq import ErrorFeedback
from kvarn.quantization.recipes import fitting_type

Indices = npt.NDArray[np.int64]
Statistics = Callable[[str], Float32 | None]  # of what a matrix of the source reads, by its name


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A layer that stays, by its number in the source, with the numbers of what stays of it."""

    layer: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers that stay, in order."""

    layers: tuple[LayerCut, ...]

    def removes_nothing(self, spec: ModelSpec) -> bool:
        return self == whole(spec)


def whole(spec: ModelSpec) -> Cut:
    """The cut that leaves everything."""
    return Cut(tuple(whole_layer(layer, block) for layer, block in enumerate(spec.blocks)))


def whole_layer(layer: int, block: Block) -> LayerCut:
    attention, ffn = block.attention, block.feed_forward
    return LayerCut(
        layer, tuple(range(attention.num_heads)), tuple(range(attention.num_kv_heads)), tuple(range(ffn.hidden))
    )


def cut_blocks(spec: ModelSpec, cut: Cut) -> tuple[Block, ...]:
    """The blocks of the new model."""
    return tuple(_cut_block(spec.blocks[one.layer], one) for one in cut.layers)


def _cut_block(block: Block, cut: LayerCut) -> Block:
    assert isinstance(block.feed_forward, FeedForward)
    attention = replace(block.attention, num_heads=len(cut.heads), num_kv_heads=len(cut.kv_heads))
    return replace(block, mixer=attention, feed_forward=replace(block.feed_forward, hidden=len(cut.channels)))


def parameters(tensors: Mapping[str, TensorInfo]) -> int:
    """The weights of all layers; embedding and head are not counted."""
    return sum(info.num_values for name, info in tensors.items() if name.startswith("blk."))


@dataclass(frozen=True, slots=True)
class _TensorPart:
    """Rows and columns of one tensor of the source; None: all."""

    source: TensorInfo
    rows: Indices | None
    columns: Indices | None


class PrunedWeights:
    """The weights of a source through a cut. refits: new values of some of them, by the source's name.

    importance: weights of the columns, for matrices that are encoded again; moments: E[x x^T] of what they read, where
    it is known: then with error feedback.
    keeps_floats: what would be encoded again is F16 instead, for another step that rounds.
    """

    def __init__(
        self,
        source: WeightSource,
        spec: ModelSpec,
        cut: Cut,
        *,
        refits: Mapping[str, Float32] | None = None,
        importance: Statistics = lambda _: None,
        moments: Statistics = lambda _: None,
        threads: int = 1,
        keeps_floats: bool = False,
    ) -> None:
        self._source, self._refits = source, refits or {}
        self._importance, self._moments = importance, moments
        self._team = _native.ThreadTeam(threads)
        self._pieces = dict(_pieces(source, spec, cut))
        self._keeps_floats = keeps_floats
        self.layers = tuple(one.layer for one in cut.layers)
        self.hyperparameters = cut_hyperparameters(source, spec, cut)
        self.metadata: Mapping[str, Any] = {**source.metadata, **self.hyperparameters}
        self.tensors: dict[str, TensorInfo] = {name: self._info(name, one) for name, one in self._pieces.items()}

    @property
    def path(self) -> str:
        return self._source.path

    def source_name(self, name: str) -> str:
        """What the source calls a tensor."""
        return self._pieces[name].source.name

    @property
    def encoded_again(self) -> tuple[str, ...]:
        """The tensors whose quantised values were rounded a second time."""
        return tuple(
            name
            for name, one in self._pieces.items()
            if not (one.source.type in FLOATS or self.tensors[name].type in FLOATS or self._is_bytes(one))
        )

    def raw(self, name: str) -> Bytes:
        one, info = self._pieces[name], self.tensors[name]
        if self._is_bytes(one):
            return _bytes(self._source.raw(one.source.name), one)
        values = np.ascontiguousarray(self.array(name), np.float32)
        as_floats = replace(info, type=TensorType.F32)
        flat = values.reshape(-1).view(np.uint8)
        if info.type is TensorType.F32:
            return flat
        weight = self._importance(one.source.name)
        if weight is not None and one.columns is not None:
            weight = np.ascontiguousarray(weight[one.columns])
        stored = np.concatenate(list(requantized(flat, as_floats, info.type, weight, self._team)))
        moments = self._moments(one.source.name) if has_grid(info.type) else None
        if moments is None:
            return stored
        if one.columns is not None:
            moments = moments[np.ix_(one.columns, one.columns)]
        return ErrorFeedback(moments).rounded(values, stored, info.type)

    def array(self, name: str) -> Float32:
        one = self._pieces[name]
        if one.source.name in self._refits:
            return self._refits[one.source.name]
        values = self._source.array(one.source.name)
        values = values if one.rows is None else values[one.rows]
        return values if one.columns is None else values[:, one.columns]

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages([self._pieces[name].source.name for name in names])

    def verify_unchanged(self) -> None:
        self._source.verify_unchanged()

    def close(self) -> None:
        self._source.close()

    def _is_bytes(self, one: _TensorPart) -> bool:
        """Whether the stored bytes of the source can be taken."""
        return one.source.name not in self._refits and _whole_blocks(one) is not None

    def _info(self, name: str, one: _TensorPart) -> TensorInfo:
        shape = list(one.source.shape)
        if one.rows is not None:
            shape[0] = len(one.rows)
        if one.columns is not None:
            shape[-1] = len(one.columns)
        type = one.source.type
        if not self._is_bytes(one):
            is_float = type in FLOATS or self._keeps_floats
            type = (type if type in FLOATS else TensorType.F16) if is_float else fitting_type(type, shape[-1])
        return TensorInfo(name, type, tuple(shape))


def cut_hyperparameters(source: WeightSource, spec: ModelSpec, cut: Cut) -> dict[str, Any]:
    """The hyperparameters that a cut changes, as GGUF has them."""
    prefix, first = source.metadata["general.architecture"], cut.layers[0]
    attention = spec.blocks[0].attention
    changed: dict[str, Any] = {
        f"{prefix}.block_count": len(cut.layers),
        f"{prefix}.feed_forward_length": len(first.channels),
        f"{prefix}.attention.head_count": len(first.heads),
        f"{prefix}.attention.head_count_kv": len(first.kv_heads),
    }
    if len(first.heads) != attention.num_heads:  # readers infer them from width and heads otherwise
        changed |= {f"{prefix}.attention.{key}_length": attention.head_dim for key in ("key", "value")}
        if attention.rope is not None:
            changed[f"{prefix}.rope.dimension_count"] = 2 * len(attention.rope.inverse_frequencies)
    return changed


def _pieces(source: WeightSource, spec: ModelSpec, cut: Cut) -> Iterator[tuple[str, _TensorPart]]:
    """The tensors of the new model in the order of the source: what no layer owns, and the layers that stay."""
    places = {one.layer: (number, one) for number, one in enumerate(cut.layers)}
    for name, info in source.tensors.items():
        if not name.startswith("blk."):
            yield name, _TensorPart(info, None, None)
            continue
        _, layer, kind = name.split(".", 2)
        if int(layer) in places:
            number, one = places[int(layer)]
            yield f"blk.{number}.{kind}", _cut_piece(info, kind, spec.blocks[one.layer], one)


def _cut_piece(info: TensorInfo, kind: str, block: Block, cut: LayerCut) -> _TensorPart:
    stem, attention = kind.partition(".")[0], block.attention
    channels = _chosen(cut.channels, block.feed_forward.hidden)
    heads = _spread(cut.heads, attention.num_heads, attention.head_dim)
    kv_heads = _spread(cut.kv_heads, attention.num_kv_heads, attention.head_dim)
    rows = {"ffn_gate": channels, "ffn_up": channels, "attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}
    columns = {"ffn_down": channels, "attn_output": heads}
    return _TensorPart(info, rows.get(stem), columns.get(stem) if len(info.shape) == 2 else None)


def _chosen(numbers: tuple[int, ...], count: int) -> Indices | None:
    return None if len(numbers) == count else np.array(numbers, np.int64)


def _spread(heads: tuple[int, ...], count: int, head_dim: int) -> Indices | None:
    """The rows of these heads."""
    chosen = _chosen(heads, count)
    return None if chosen is None else (chosen[:, None] * head_dim + np.arange(head_dim)).reshape(-1)


def _whole_blocks(one: _TensorPart) -> Indices | None:
    """The numbers of the blocks of a row that stay, where all of them stay or go whole."""
    block = one.source.type.block_values
    columns = np.arange(one.source.shape[-1]) if one.columns is None else one.columns
    if one.columns is None:
        return columns[::block] // block
    if len(columns) % block:
        return None
    groups = columns.reshape(-1, block)
    is_whole = (groups[:, :1] % block == 0).all() and (groups == groups[:, :1] + np.arange(block)).all()
    return groups[:, 0] // block if is_whole else None


def _bytes(raw: Bytes, one: _TensorPart) -> Bytes:
    if one.rows is None and one.columns is None:
        return raw
    blocks = _whole_blocks(one)
    assert blocks is not None
    stored = raw.reshape(one.source.shape[0], -1)
    if one.rows is not None:
        stored = stored[one.rows]
    if one.columns is not None:
        size = one.source.type.block_bytes
        stored = stored.reshape(len(stored), -1, size)[:, blocks]
    return np.ascontiguousarray(stored).reshape(-1)
