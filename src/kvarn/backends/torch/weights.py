"""The weights on the device: quantised types dequantised, floats in the device's type, Q, K and V one matrix, gate and
up one matrix. Norms and biases stay in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.torch.dequantize import dequantize
from kvarn.backends.torch.device import Device
from kvarn.backends.torch.streams.weights import (
    AltUpWeights,
    PerLayerEmbeddingWeights,
    PerLayerWeights,
    load_altup,
    load_per_layer,
    load_per_layer_embedding,
)
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.models.residual import AltUp
from kvarn.models.spec import (
    Attention,
    Block,
    FeedForward,
    GatedDeltaNet,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    ShortConv,
)
from kvarn.models.tensors.shapes import block_norms

FLOATS = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix (out, in) and its bias."""

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
    """The router and every expert's matrices, (experts, out, in), and biases, (experts, out)."""

    router: Linear
    gate_up: Linear
    down: Linear
    selection_bias: Tensor | None = None
    shared: FeedForwardWeights | None = None
    shared_gate: Tensor | None = None  # (width)
    scale: Tensor | None = None  # (experts)


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
class BlockWeights:
    """One layer; norms by their names."""

    index: int
    spec: Block
    qkv: Linear
    output: Linear
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    feed_forward: FeedForwardWeights | ExpertWeights
    norms: dict[str, NormWeights]
    sinks: Tensor | None = None  # (heads)
    output_gate: Linear | None = None
    recurrent: ShortConvWeights | DeltaNetWeights | None = None
    beside: ExpertWeights | None = None
    per_layer: PerLayerWeights | None = None
    output_scale: Tensor | None = None  # (1)
    laurel: tuple[Linear, Linear] | None = None  # to few columns and back
    altup: AltUpWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model."""

    spec: ModelSpec
    tokens: Tensor
    positions: Tensor | None
    token_types: Tensor | None
    embedding_norm: NormWeights | None
    blocks: tuple[BlockWeights, ...]
    output_norm: NormWeights | None
    head: Linear | None
    per_layer: PerLayerEmbeddingWeights | None = None
    streams: tuple[Tensor, Tensor] | None = None  # (streams - 1, width, width) each: into all streams and back


class WeightReader:
    """Reads tensors by name onto a device, telling its progress."""

    def __init__(self, source: WeightSource, device: Device, progress: Callable[[int, int], None] | None) -> None:
        self._source = source.stored if isinstance(source, DenseWeights) else source  # made dense on the device
        self._device = device
        self._progress = progress
        self._total = sum(info.num_bytes for info in self._source.tensors.values())
        self._done = 0

    def matrix(self, *names: str) -> Tensor:
        """One or several matrices under each other, in the device's type; stacks of experts by their rows."""
        parts = [self._read(name, self._device.dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def vector(self, *names: str) -> Tensor:
        parts = [self._read(name, torch.float32) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def linear(self, *stems: str, bias: bool = False) -> Linear:
        weight = self.matrix(*(f"{stem}.weight" for stem in stems))
        return Linear(weight, self.vector(*(f"{stem}.bias" for stem in stems)) if bias else None)

    def norm(self, stem: str, norm: Norm | None) -> NormWeights | None:
        if norm is None:
            return None
        bias = self.vector(f"{stem}.bias") if norm.has_bias else None
        return NormWeights(norm, self.vector(f"{stem}.weight"), bias)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._source.tensors[name]
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=dtype, device=self._device.torch_device)
        raw = torch.from_numpy(np.array(self._source.raw(name))).to(self._device.torch_device)
        if info.type in FLOATS:
            values = raw.view(FLOATS[info.type]).view(info.shape).to(dtype)
        else:
            values = dequantize(raw, info.type, info.shape, dtype)
        self._source.release_pages((name,))
        self._done += info.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return values


def load_weights(reader: WeightReader, spec: ModelSpec) -> ModelWeights:
    """Read every tensor of a model."""
    embedding = spec.embedding
    tokens = reader.matrix("token_embd.weight")
    head = None
    if spec.head is not None:
        bias = reader.vector("output.bias") if spec.head.bias else None
        head = Linear(tokens if spec.head.tied else reader.matrix("output.weight"), bias)
    return ModelWeights(
        spec=spec,
        tokens=tokens,
        positions=None if embedding.positions is None else reader.vector("position_embd.weight"),
        token_types=reader.vector("token_types.weight") if embedding.token_types else None,
        embedding_norm=reader.norm("token_embd_norm", embedding.norm),
        blocks=tuple(_load_block(reader, index, block, spec.altup) for index, block in enumerate(spec.blocks)),
        output_norm=reader.norm("output_norm", spec.output_norm),
        head=head,
        per_layer=load_per_layer_embedding(reader, embedding.per_layer),
        streams=None
        if spec.altup is None
        else (reader.matrix("altup_proj.weight"), reader.matrix("altup_unembd_proj.weight")),
    )


def _load_block(reader: WeightReader, index: int, block: Block, altup: AltUp | None) -> BlockWeights:
    stem, attention = f"blk.{index}", block.mixer
    norms = {name: reader.norm(f"{stem}.{name}", block.norm) for name in block_norms(block)}
    if not isinstance(attention, Attention):
        return _load_recurrent(reader, index, block, {name: norm for name, norm in norms.items() if norm is not None})
    has_keys = attention.kv_source is None
    qkv = (f"{stem}.attn_{part}" for part in ("qkv" if has_keys else "q"))
    q_norm = reader.norm(f"{stem}.attn_q_norm", attention.qk_norm)
    k_norm = reader.norm(f"{stem}.attn_k_norm", attention.qk_norm if has_keys else None)
    return BlockWeights(
        index=index,
        spec=block,
        qkv=reader.linear(*qkv, bias=attention.qkv_bias),
        output=reader.linear(f"{stem}.attn_output", bias=attention.output_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        feed_forward=_load_feed_forward(reader, stem, block.feed_forward),
        norms={name: norm for name, norm in norms.items() if norm is not None},
        sinks=reader.vector(f"{stem}.attn_sinks.weight") if attention.sinks else None,
        output_gate=reader.linear(f"{stem}.attn_gate", bias=attention.qkv_bias) if attention.output_gate else None,
        beside=None if block.beside is None else _load_experts(reader, stem, block.beside),
        per_layer=load_per_layer(reader, stem, block.per_layer),
        laurel=None if block.laurel is None else (reader.linear(f"{stem}.laurel_l"), reader.linear(f"{stem}.laurel_r")),
        altup=load_altup(reader, stem, altup),
        output_scale=reader.vector(f"{stem}.layer_output_scale.weight") if block.output_scale else None,
    )


def _load_recurrent(reader: WeightReader, index: int, block: Block, norms: dict[str, NormWeights]) -> BlockWeights:
    stem, weights = f"blk.{index}", _load_state_weights(reader, f"blk.{index}", block)
    is_short = isinstance(weights, ShortConvWeights)
    return BlockWeights(
        index=index,
        spec=block,
        qkv=reader.linear(f"{stem}.shortconv.in_proj" if is_short else f"{stem}.attn_qkv"),
        output=reader.linear(f"{stem}.shortconv.out_proj" if is_short else f"{stem}.ssm_out"),
        q_norm=None,
        k_norm=None,
        feed_forward=_load_feed_forward(reader, stem, block.feed_forward),
        norms=norms,
        recurrent=weights,
    )


def _load_state_weights(reader: WeightReader, stem: str, block: Block) -> ShortConvWeights | DeltaNetWeights:
    if isinstance(block.mixer, ShortConv):
        return ShortConvWeights(reader.vector(f"{stem}.shortconv.conv.weight"))
    assert isinstance(block.mixer, GatedDeltaNet), "an attention has no state"
    norm = reader.norm(f"{stem}.ssm_norm", block.mixer.norm)
    assert norm is not None, "a delta net has a norm"
    return DeltaNetWeights(
        gate=reader.linear(f"{stem}.attn_gate"),
        beta=reader.linear(f"{stem}.ssm_beta"),
        alpha=reader.linear(f"{stem}.ssm_alpha"),
        conv=reader.vector(f"{stem}.ssm_conv1d.weight"),
        dt=reader.vector(f"{stem}.ssm_dt.bias"),
        a=reader.vector(f"{stem}.ssm_a"),
        norm=norm,
    )


def _load_feed_forward(
    reader: WeightReader, stem: str, ffn: FeedForward | MixtureOfExperts
) -> FeedForwardWeights | ExpertWeights:
    if isinstance(ffn, MixtureOfExperts):
        return _load_experts(reader, stem, ffn)
    first = (f"{stem}.ffn_gate", f"{stem}.ffn_up") if ffn.gated else (f"{stem}.ffn_up",)
    return FeedForwardWeights(reader.linear(*first, bias=ffn.bias), reader.linear(f"{stem}.ffn_down", bias=ffn.bias))


def _load_experts(reader: WeightReader, stem: str, moe: MixtureOfExperts) -> ExpertWeights:
    shared = shared_gate = None
    if moe.shared is not None:
        gate_up = reader.linear(f"{stem}.ffn_gate_shexp", f"{stem}.ffn_up_shexp")
        shared = FeedForwardWeights(gate_up, reader.linear(f"{stem}.ffn_down_shexp"))
        shared_gate = reader.vector(f"{stem}.ffn_gate_inp_shexp.weight") if moe.shared.gate else None
    return ExpertWeights(
        router=reader.linear(f"{stem}.ffn_gate_inp", bias=moe.router_bias),
        gate_up=reader.linear(f"{stem}.ffn_gate_exps", f"{stem}.ffn_up_exps", bias=moe.expert_bias),
        down=reader.linear(f"{stem}.ffn_down_exps", bias=moe.expert_bias),
        selection_bias=reader.vector(f"{stem}.exp_probs_b.bias") if moe.selection_bias else None,
        shared=shared,
        shared_gate=shared_gate,
        scale=reader.vector(f"{stem}.ffn_down_exps.scale") if moe.expert_scale else None,
    )
