"""What one rank of several holds of a model: its spec, and its slices of the weights. Knows no tensors of torch.

rank = stage * tensor + part        stage: contiguous layers, part: of the heads and columns of each layer
stage 0 also has the vocabulary, cut by rows for embedding and head; the last stage has the output norm
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvarn.errors import ConfigError
from kvarn.formats.quants import dequantize
from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.models.spec import Attention, Block, FeedForward, MixtureOfExperts, ModelSpec
from kvarn.models.tensors.shapes import expected_tensors

VOCABULARY = ("token_embd.weight", "output.weight")
ADDED_ONCE = (
    "attn_output.bias",
    "ffn_down.bias",
    "ffn_down_exps.bias",
    "ffn_exps.bias",
)  # biases of sums over ranks: the first part adds them


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """Among how many ranks each layer's matrices are divided, and among how many stages the layers."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> RankPlace:
        return RankPlace(self, rank // self.tensor, rank % self.tensor)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands."""

    shape: ParallelShape
    stage: int
    part: int

    @property
    def rank(self) -> int:
        return self.stage * self.shape.tensor + self.part

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.shape.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        count = self.shape.pipeline
        return range(num_layers * self.stage // count, num_layers * (self.stage + 1) // count)

    def tokens(self, vocab_size: int) -> range:
        """The rows of the vocabulary this rank has; none beyond the first stage."""
        length = -(-vocab_size // self.shape.tensor) if self.is_first else 0
        return range(min(vocab_size, self.part * length), min(vocab_size, (self.part + 1) * length))


def check_divides(spec: ModelSpec, shape: ParallelShape) -> None:
    """Refuse a model that cannot be divided so, naming the numbers that can."""
    if shape.pipeline > len(spec.blocks):
        raise ConfigError(
            f"pipeline_parallel is {shape.pipeline}, the model has {len(spec.blocks)} layers; give at most that many"
        )
    fault = next((fault for block in spec.blocks if (fault := _fault(block, shape.tensor))), None)
    if fault is not None:
        heads = min(block.attention.num_heads for block in spec.blocks)
        usable = [n for n in range(1, heads + 1) if not any(_fault(block, n) for block in spec.blocks)]
        raise ConfigError(
            f"tensor_parallel is {shape.tensor}, which does not divide the model's {fault}; "
            f"give one of {', '.join(map(str, usable))}, or divide the layers with pipeline_parallel"
        )


def shard_spec(spec: ModelSpec, place: RankPlace) -> ModelSpec:
    """The model as one rank computes it: fewer heads, columns and layers. vocab_size stays the model's."""
    own = [spec.blocks[layer] for layer in place.layers(len(spec.blocks))]
    embedding = spec.embedding
    if not place.is_first:
        embedding = replace(embedding, positions=None, token_types=False, norm=None)
    return replace(
        spec,
        blocks=tuple(_shard_block(block, place) for block in own),
        embedding=embedding,
        head=spec.head if place.is_first else None,
        output_norm=spec.output_norm if place.is_last else None,
    )


class ShardWeights(WeightProxy):
    """One rank's slices of the weights, layers numbered from its own first one.

    Slices of rows are slices of the file's bytes. Columns are cut between quantised blocks; where a cut would fall into
    one, the values are dequantised here.
    """

    def __init__(self, source: WeightSource, spec: ModelSpec, place: RankPlace) -> None:
        self._place = place
        self._first_layer = place.layers(len(spec.blocks)).start
        self._tokens = place.tokens(spec.vocab_size)
        expected = expected_tensors(shard_spec(spec, place)).items()
        shapes = {name: shape for name, shape in expected if not name.startswith("cls")}
        self._stored = {name: source.tensors[self._stored_name(name)] for name in shapes}
        infos = {name: self._info(name, shape) for name, shape in shapes.items()}
        super().__init__(source, infos)
        self.tensors = infos

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages([self._stored_name(name) for name in names])

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        stored, info = self._stored[name], self.tensors[name]
        if not info.num_bytes or (name.endswith(ADDED_ONCE) and self._place.part > 0):
            return np.zeros(info.num_bytes, np.uint8)
        axis = _cut_axis(stored, info)
        if axis is None:
            return self._source.raw(stored.name)
        start, length = self._start(name, axis), info.shape[axis]
        if info.type != stored.type:
            values = np.moveaxis(self._source.array(stored.name), axis, 0)[start : start + length]
            return np.ascontiguousarray(np.moveaxis(values, 0, axis)).reshape(-1).view(np.uint8)
        unit = stored.type.block_values if axis == len(stored.shape) - 1 else 1  # values that are not cut
        inner = stored.type.num_bytes(unit * int(np.prod(stored.shape[axis + 1 :], dtype=np.int64)))
        raw = self._source.raw(stored.name).reshape(-1, stored.shape[axis] // unit, inner)
        return np.ascontiguousarray(raw[:, start // unit : (start + length) // unit]).reshape(-1)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        info = self.tensors[name]
        return dequantize(self.raw(name), info.type, info.shape)

    def _info(self, name: str, shape: tuple[int | None, ...]) -> TensorInfo:
        stored = self._stored[name]
        lengths = tuple(have if want is None else want for want, have in zip(shape, stored.shape, strict=True))
        if name in VOCABULARY:
            lengths = (len(self._tokens), *lengths[1:])
        info = TensorInfo(name, stored.type if lengths[0] else TensorType.F32, lengths)
        axis = _cut_axis(stored, info)
        if axis is None or axis < len(lengths) - 1:
            return info
        is_whole = all(value % stored.type.block_values == 0 for value in (self._start_of(stored, info), lengths[axis]))
        return info if is_whole else replace(info, type=TensorType.F32)

    def _start(self, name: str, axis: int) -> int:
        if name in VOCABULARY:
            return self._tokens.start
        assert _cut_axis(self._stored[name], self.tensors[name]) == axis, "one axis is cut"
        return self._start_of(self._stored[name], self.tensors[name])

    def _start_of(self, stored: TensorInfo, info: TensorInfo) -> int:
        """Where this part begins; several parts share one KV head where there are fewer of these than parts."""
        axis = _cut_axis(stored, info)
        assert axis is not None, "something is cut"
        length = info.shape[axis]
        pieces = stored.shape[axis] // length
        return self._place.part * pieces // self._place.shape.tensor * length

    def _stored_name(self, name: str) -> str:
        if not name.startswith("blk."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"blk.{int(layer) + self._first_layer}.{rest}"


def kv_replicas(attention: Attention, shape: ParallelShape) -> int:
    """How many parts hold a copy of each KV head."""
    return max(1, shape.tensor // attention.num_kv_heads)


def _fault(block: Block, tensor: int) -> str | None:
    """What of a layer cannot be divided."""
    attention, ffn = block.attention, block.feed_forward
    if tensor > 1 and attention.qk_norm is not None and attention.qk_norm_span == "row":
        return "norm over all heads of Q and K"
    if attention.num_heads % tensor:
        return f"{attention.num_heads} attention heads"
    if attention.num_kv_heads % tensor and tensor % attention.num_kv_heads:
        return f"{attention.num_kv_heads} KV heads"
    hiddens = [ffn.hidden] if isinstance(ffn, FeedForward) or ffn.shared is None else [ffn.hidden, ffn.shared.hidden]
    return next((f"{hidden:,} columns of the feed-forward" for hidden in hiddens if hidden % tensor), None)


def _shard_block(block: Block, place: RankPlace) -> Block:
    attention, ffn, tensor = block.attention, block.feed_forward, place.shape.tensor
    heads, kv_heads = attention.num_heads // tensor, max(1, attention.num_kv_heads // tensor)
    ffn = replace(ffn, hidden=ffn.hidden // tensor)
    if isinstance(ffn, MixtureOfExperts) and ffn.shared is not None:
        ffn = replace(ffn, shared=replace(ffn.shared, hidden=ffn.shared.hidden // tensor))
    slopes = None if attention.alibi is None else attention.alibi[place.part * heads : (place.part + 1) * heads]
    own = replace(attention, num_heads=heads, num_kv_heads=kv_heads, alibi=slopes)
    return replace(block, mixer=own, feed_forward=ffn)


def _cut_axis(stored: TensorInfo, info: TensorInfo) -> int | None:
    lengths = zip(stored.shape, info.shape, strict=True)
    return next((axis for axis, (whole, own) in enumerate(lengths) if whole != own), None)
