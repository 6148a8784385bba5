"""A model's weights by the names of its tensors, as its spec says which there are."""

from __future__ import annotations

from kvarn.backends.torch.loading.reader import WeightReader
from kvarn.backends.torch.streams.weights import load_altup, load_per_layer, load_per_layer_embedding
from kvarn.backends.torch.weights import (
    NOTHING,
    BlockWeights,
    CanvasWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    LatentWeights,
    Linear,
    ModelWeights,
    NormWeights,
    ShortConvWeights,
    StateSpaceWeights,
)
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.residual import AltUp
from kvarn.models.spec import Attention, Block, FeedForward, LatentAttention, MixtureOfExperts, ModelSpec
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, NoMixer, ShortConv
from kvarn.models.tensors.shapes import block_norms


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
        canvas=_load_canvas(reader, spec.generation) if isinstance(spec.generation, UniformDiffusion) else None,
        streams=None
        if spec.altup is None
        else (reader.dense("altup_proj.weight"), reader.dense("altup_unembd_proj.weight")),
    )


def _load_canvas(reader: WeightReader, diffusion: UniformDiffusion) -> CanvasWeights:
    norm = reader.norm("self_cond_pre_norm", diffusion.norm)
    assert norm is not None, "what is fed back is normed"
    return CanvasWeights(
        norm=norm,
        feed_forward=FeedForward(diffusion.hidden, diffusion.activation),
        gate_up=reader.linear("self_cond_gate", "self_cond_up"),
        down=reader.linear("self_cond_down"),
    )


def _load_block(reader: WeightReader, index: int, block: Block, altup: AltUp | None) -> BlockWeights:
    stem, attention = f"blk.{index}", block.mixer
    norms = {name: reader.norm(f"{stem}.{name}", block.norm) for name in block_norms(block)}
    if isinstance(attention, LatentAttention):
        return _load_latent(reader, index, block, {name: norm for name, norm in norms.items() if norm is not None})
    if isinstance(attention, NoMixer):
        return _load_feed_forward_alone(reader, index, block, {name: norm for name, norm in norms.items() if norm})
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
        text_scale=reader.vector(f"{stem}.enc_layer_output_scale.weight") if block.text_scale else None,
        recurrent=None if block.state is None else _load_state_space(reader, stem, block.state),
    )


def _load_latent(reader: WeightReader, index: int, block: Block, norms: dict[str, NormWeights]) -> BlockWeights:
    stem, mixer = f"blk.{index}", block.mixer
    assert isinstance(mixer, LatentAttention), "only latent attention comes here"
    is_low = mixer.query_rank is not None
    kv_norm = reader.norm(f"{stem}.attn_kv_a_norm", mixer.norm)
    assert kv_norm is not None, "a latent is normed"
    return BlockWeights(
        index=index,
        spec=block,
        qkv=reader.linear(f"{stem}.attn_q_a" if is_low else f"{stem}.attn_q", f"{stem}.attn_kv_a_mqa"),
        output=reader.linear(f"{stem}.attn_output"),
        q_norm=None,
        k_norm=None,
        feed_forward=_load_feed_forward(reader, stem, block.feed_forward),
        norms=norms,
        latent=LatentWeights(
            q_norm=reader.norm(f"{stem}.attn_q_a_norm", mixer.norm) if is_low else None,
            q_b=reader.linear(f"{stem}.attn_q_b") if is_low else None,
            kv_norm=kv_norm,
            k_b=reader.dense(f"{stem}.attn_k_b.weight"),
            v_b=reader.dense(f"{stem}.attn_v_b.weight"),
        ),
    )


def _load_recurrent(reader: WeightReader, index: int, block: Block, norms: dict[str, NormWeights]) -> BlockWeights:
    stem, weights = f"blk.{index}", _load_state_weights(reader, f"blk.{index}", block)
    if isinstance(weights, StateSpaceWeights):
        first, last = weights.input, weights.output
    else:
        is_short = isinstance(weights, ShortConvWeights)
        first = reader.linear(f"{stem}.shortconv.in_proj" if is_short else f"{stem}.attn_qkv")
        last = reader.linear(f"{stem}.shortconv.out_proj" if is_short else f"{stem}.ssm_out")
    return BlockWeights(
        index=index,
        spec=block,
        qkv=first,
        output=last,
        q_norm=None,
        k_norm=None,
        feed_forward=_load_feed_forward(reader, stem, block.feed_forward),
        norms=norms,
        recurrent=weights,
    )


def _load_feed_forward_alone(
    reader: WeightReader, index: int, block: Block, norms: dict[str, NormWeights]
) -> BlockWeights:
    ffn = _load_feed_forward(reader, f"blk.{index}", block.feed_forward)
    return BlockWeights(index, block, NOTHING, NOTHING, q_norm=None, k_norm=None, feed_forward=ffn, norms=norms)


def _load_state_weights(
    reader: WeightReader, stem: str, block: Block
) -> ShortConvWeights | DeltaNetWeights | StateSpaceWeights:
    if isinstance(block.mixer, ShortConv):
        return ShortConvWeights(reader.vector(f"{stem}.shortconv.conv.weight"))
    if isinstance(block.mixer, Mamba2 | Mamba):
        return _load_state_space(reader, stem, block.mixer)
    assert isinstance(block.mixer, GatedDeltaNet), "an attention has no state"
    norm = reader.norm(f"{stem}.ssm_norm", block.mixer.norm)
    assert norm is not None, "a delta net has a norm"
    return DeltaNetWeights(
        gate=reader.linear(f"{stem}.attn_gate"),
        beta=reader.narrow(f"{stem}.ssm_beta"),
        alpha=reader.narrow(f"{stem}.ssm_alpha"),
        conv=reader.vector(f"{stem}.ssm_conv1d.weight"),
        dt=reader.vector(f"{stem}.ssm_dt.bias"),
        a=reader.vector(f"{stem}.ssm_a"),
        norm=norm,
    )


def _load_state_space(reader: WeightReader, stem: str, layer: Mamba2 | Mamba) -> StateSpaceWeights:
    is_selective = isinstance(layer, Mamba)
    has_norm = not isinstance(layer, Mamba) and layer.norm is not None
    return StateSpaceWeights(
        input=reader.linear(f"{stem}.ssm_in", bias=layer.bias),
        output=reader.linear(f"{stem}.ssm_out", bias=layer.bias if isinstance(layer, Mamba) else layer.output_bias),
        conv=reader.vector(f"{stem}.ssm_conv1d.weight"),
        conv_bias=reader.vector(f"{stem}.ssm_conv1d.bias") if layer.conv_bias else None,
        dt=reader.vector(f"{stem}.ssm_dt.bias"),
        a=reader.vector(f"{stem}.ssm_a"),
        d=reader.vector(f"{stem}.ssm_d"),
        norm=reader.vector(f"{stem}.ssm_norm.weight") if has_norm else None,
        parameters=reader.vector(f"{stem}.ssm_x.weight") if is_selective else None,
        steps=reader.vector(f"{stem}.ssm_dt.weight") if is_selective else None,
    )


def _load_feed_forward(
    reader: WeightReader, stem: str, ffn: FeedForward | MixtureOfExperts
) -> FeedForwardWeights | ExpertWeights:
    if not ffn.hidden:
        return FeedForwardWeights(NOTHING, NOTHING)
    if isinstance(ffn, MixtureOfExperts):
        return _load_experts(reader, stem, ffn)
    first = (f"{stem}.ffn_gate", f"{stem}.ffn_up") if ffn.gated else (f"{stem}.ffn_up",)
    return FeedForwardWeights(reader.linear(*first, bias=ffn.bias), reader.linear(f"{stem}.ffn_down", bias=ffn.bias))


def _load_experts(reader: WeightReader, stem: str, moe: MixtureOfExperts) -> ExpertWeights:
    shared = shared_gate = None
    parts = ("gate", "up") if moe.gated else ("up",)
    if moe.shared is not None:
        gate_up = reader.linear(*(f"{stem}.ffn_{part}_shexp" for part in parts))
        shared = FeedForwardWeights(gate_up, reader.linear(f"{stem}.ffn_down_shexp"))
        shared_gate = reader.vector(f"{stem}.ffn_gate_inp_shexp.weight") if moe.shared.gate else None
    return ExpertWeights(
        router=reader.narrow(f"{stem}.ffn_gate_inp", bias=moe.router_bias),
        gate_up=reader.experts(*(f"{stem}.ffn_{part}_exps" for part in parts), bias=moe.expert_bias),
        down=reader.experts(f"{stem}.ffn_down_exps", bias=moe.expert_bias),
        selection_bias=reader.vector(f"{stem}.exp_probs_b.bias") if moe.selection_bias else None,
        shared=shared,
        shared_gate=shared_gate,
        scale=reader.vector(f"{stem}.ffn_down_exps.scale") if moe.expert_scale else None,
        bias=reader.vector(f"{stem}.ffn_exps.bias") if moe.output_bias else None,
    )
