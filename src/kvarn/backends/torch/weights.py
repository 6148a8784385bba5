"""The weights on the device, by layer: Q, K and V one matrix, gate and up one matrix; norms and biases in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.torch.cuda.quantized.pack import QuantizedMatrix
from kvarn.backends.torch.streams.weights import AltUpWeights, PerLayerEmbeddingWeights, PerLayerWeights
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec, Norm


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix (out, in) and its bias."""

    weight: Tensor | QuantizedMatrix
    bias: Tensor | None = None


NOTHING = Linear(torch.empty(0, 0))


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The same matrix of every expert, (experts, out, in), and their biases, (experts, out)."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A models.spec.Norm with its vectors."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The router and every expert's matrices."""

    router: Linear
    gate_up: ExpertStack
    down: ExpertStack
    selection_bias: Tensor | None = None
    shared: FeedForwardWeights | None = None
    shared_gate: Tensor | None = None  # (width)
    scale: Tensor | None = None  # (experts)
    bias: Tensor | None = None  # (width)


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """gate_up holds the gate's rows, then up's; only up's where there is no gate."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    conv: Tensor  # (channels, kernel)


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Beside the input projection, which is qkv, and the output."""

    gate: Linear
    beta: Linear
    alpha: Linear
    conv: Tensor  # (channels, kernel)
    dt: Tensor  # (value heads)
    a: Tensor  # (value heads)
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class StateSpaceWeights:
    """Of a Mamba2, or with parameters and steps of a Mamba."""

    input: Linear
    output: Linear
    conv: Tensor  # (channels, kernel)
    conv_bias: Tensor | None  # (channels)
    dt: Tensor  # (heads), or (width)
    a: Tensor  # (heads), or (width, state_dim)
    d: Tensor  # (heads), or (width)
    norm: Tensor | None = None  # (values)
    parameters: Tensor | None = None  # (rank + 2 * state_dim, width)
    steps: Tensor | None = None  # (width, rank)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Beside qkv, which gives the query, or what becomes it, and then the row that is cached, and the output."""

    q_norm: NormWeights | None
    q_b: Linear | None
    kv_norm: NormWeights
    k_b: Tensor  # (heads, rank, nope_dim)
    v_b: Tensor  # (heads, value_dim, rank)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One layer; norms by their names. What its spec has not is NOTHING."""

    index: int
    spec: Block
    qkv: Linear  # of attention, or of what stands in its place
    output: Linear
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    feed_forward: FeedForwardWeights | ExpertWeights
    norms: dict[str, NormWeights]
    sinks: Tensor | None = None  # (heads)
    output_gate: Linear | None = None
    recurrent: ShortConvWeights | DeltaNetWeights | StateSpaceWeights | None = None
    beside: ExpertWeights | None = None
    per_layer: PerLayerWeights | None = None
    output_scale: Tensor | None = None  # (1)
    text_scale: Tensor | None = None  # (1) of rows before a canvas, instead
    laurel: tuple[Linear, Linear] | None = None  # to few columns and back
    altup: AltUpWeights | None = None
    latent: LatentWeights | None = None

    @property
    def attention(self) -> Attention:
        """Whether there is a state beside it or not."""
        assert isinstance(self.spec.mixer, Attention), "only of layers that have one"
        return self.spec.mixer


@dataclass(frozen=True, slots=True)
class CanvasWeights:
    """What canvas rows read of the last step."""

    norm: NormWeights
    feed_forward: FeedForward
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model."""

    spec: ModelSpec
    tokens: Tensor | QuantizedMatrix
    positions: Tensor | None
    token_types: Tensor | None
    embedding_norm: NormWeights | None
    blocks: tuple[BlockWeights, ...]
    output_norm: NormWeights | None
    head: Linear | None
    per_layer: PerLayerEmbeddingWeights | None = None
    canvas: CanvasWeights | None = None
    streams: tuple[Tensor, Tensor] | None = None  # (streams - 1, width, width) each: into all streams and back
