"""The tensors a spec needs, with their shapes: checked here, so that no backend ever sees a wrong one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.weights import WeightSource
from kvarn.models.diffusion.uniform import canvas_tensors
from kvarn.models.encoders.pooled import Classifier
from kvarn.models.recurrent import conv_channels
from kvarn.models.residual import AltUp, PerLayerEmbedding
from kvarn.models.spec import (
    Attention,
    Block,
    Encoder,
    FeedForward,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    SharedExpert,
)
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, NoMixer, ShortConv

Shape = tuple[int | None, ...]  # None: any length
# Folded into the spec when it was described.
FOLDED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
BLOCK_NORMS = {
    "pre": ("attn_norm", "ffn_norm"),
    "sandwich": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    "residual": ("attn_output_norm", "layer_output_norm"),
    "post": ("post_attention_norm", "post_ffw_norm"),
    "parallel": ("attn_norm", "ffn_norm"),
}

BESIDE_NORMS = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2", "ffn_gate_inp_norm")


def block_norms(block: Block) -> tuple[str, ...]:
    """The norms of a layer, all of the model's width."""
    beside = BESIDE_NORMS if block.beside is not None else ()
    laurel = ("laurel_post_norm",) if block.laurel is not None else ()
    sublayers = tuple(name for name in BLOCK_NORMS[block.placement] if not _is_left_out(block, name))
    sublayers += ("attn_norm_2",) if block.second_norm else ()
    return (*sublayers, *beside, *laurel, *(("post_norm",) if block.per_layer is not None else ()))


def _is_left_out(block: Block, name: str) -> bool:
    """Whether it is the norm of a sublayer that the layer has not, or has without a norm."""
    if name == "attn_norm":
        return isinstance(block.mixer, NoMixer) or not block.attn_norm
    return name == "ffn_norm" and not block.feed_forward.hidden


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """List every tensor of a model."""
    found: dict[str, Shape] = {"token_embd.weight": (spec.vocab_size, spec.width)}
    if (joined := spec.embedding.joined) is not None:
        found = {"eh_proj.weight": (spec.width, 2 * spec.width)}
        found |= dict([*_norm("enorm", joined, spec.width), *_norm("hnorm", joined, spec.width)])
    if spec.embedding.positions is not None:
        found["position_embd.weight"] = (spec.embedding.positions, spec.width)
    if spec.embedding.token_types:
        found["token_types.weight"] = (None, spec.width)
    if spec.embedding.norm is not None:
        found.update(_norm("token_embd_norm", spec.embedding.norm, spec.width))
    if spec.embedding.per_layer is not None:
        found.update(_per_layer_embedding(spec.embedding.per_layer, len(spec.blocks), spec.width))
    for layer, block in enumerate(spec.blocks):
        found.update((f"blk.{layer}.{name}", shape) for name, shape in _block(block, spec.width))
        if spec.altup is not None:
            found.update((f"blk.{layer}.{name}", shape) for name, shape in _altup(spec.altup, spec.width))
    if spec.altup is not None:
        shape = (spec.altup.streams - 1, spec.width, spec.width)
        found |= {"altup_proj.weight": shape, "altup_unembd_proj.weight": shape}
    if spec.output_norm is not None:
        found.update(_norm("output_norm", spec.output_norm, spec.width))
    if spec.head is not None and not spec.head.tied:
        found["output.weight"] = (spec.vocab_size, spec.width)
    if spec.head is not None and spec.head.bias:
        found["output.bias"] = (spec.vocab_size,)
    found |= canvas_tensors(spec.generation, spec.width)
    if isinstance(spec.generation, Encoder) and spec.generation.classifier is not None:
        found.update(_classifier(spec.generation.classifier, spec.width))
    if isinstance(spec.generation, Encoder):
        widths = (spec.width, *(dense.width for dense in spec.generation.dense))
        for number, dense in enumerate(spec.generation.dense):
            found.update(_matrix(f"dense_{number + 2}", dense.width, widths[number], bias=dense.bias))
    return found


def _classifier(classifier: Classifier, width: int) -> Iterator[tuple[str, Shape]]:
    if classifier.dense:
        yield from _matrix("cls", width, width, bias=classifier.dense_bias)
    if classifier.norm is not None:
        yield from _norm("cls.norm", classifier.norm, width)
    yield from _matrix("cls.output", classifier.labels, width, bias=classifier.output_bias)


def check_tensors(spec: ModelSpec, weights: WeightSource) -> None:
    """Refuse missing, mis-shaped and unknown tensors, and norms, biases and the like that are not numbers."""
    expected = expected_tensors(spec)
    for name, shape in expected.items():
        info = weights.tensors.get(name)
        if info is None:
            raise FormatError(f"tensor {name} is missing; the file may be incomplete", file=weights.path)
        if len(info.shape) != len(shape) or not all(w in (None, g) for w, g in zip(shape, info.shape, strict=True)):
            wanted = tuple("any" if length is None else length for length in shape)
            raise FormatError(f"tensor {name} has shape {info.shape}; expected {wanted}", file=weights.path)
    unknown = sorted(weights.tensors.keys() - expected.keys() - FOLDED)
    if unknown:
        listed = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        raise UnsupportedModel(
            f"{weights.path}: {spec.architecture} has no tensors {listed}; "
            "this variant of the architecture is not supported, choose another model",
            fields=tuple(unknown),
        )
    for name, shape in expected.items():
        if (len(shape) == 1 or name.endswith(".bias")) and not np.isfinite(weights.array(name)).all():
            raise FormatError(
                f"tensor {name} has NaN or infinite values; the file is damaged",
                file=weights.path,
            )


def _norm(name: str, norm: Norm, length: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (length,)
    if norm.has_bias:
        yield f"{name}.bias", (length,)


def _block(block: Block, width: int) -> Iterator[tuple[str, Shape]]:
    for name in block_norms(block):
        yield from _norm(name, block.norm, width)
    if isinstance(block.mixer, GatedDeltaNet):
        yield from _gated_delta_net(block.mixer, width)
    elif isinstance(block.mixer, ShortConv):
        yield from _short_conv(block.mixer, width)
    elif isinstance(block.mixer, LatentAttention):
        yield from _latent_attention(block.mixer, width)
    elif isinstance(block.mixer, Attention):
        yield from _attention(block.mixer, width)
    elif isinstance(block.mixer, Mamba):
        yield from _mamba(block.mixer, width)
    mamba2 = block.mixer if isinstance(block.mixer, Mamba2) else block.state
    if mamba2 is not None:
        yield from _mamba2(mamba2, width)
    if isinstance(block.feed_forward, MixtureOfExperts):
        yield from _experts(block.feed_forward, width)
    else:
        yield from _feed_forward(block.feed_forward, width)
    if block.beside is not None:
        yield from _experts(block.beside, width)
    if block.per_layer is not None:
        yield from _matrix("inp_gate", block.per_layer.length, width, bias=False)
        yield from _matrix("proj", width, block.per_layer.length, bias=False)
    if block.laurel is not None:
        yield from _matrix("laurel_l", block.laurel, width, bias=False)
        yield from _matrix("laurel_r", width, block.laurel, bias=False)
    factors = {"layer_output_scale.weight": block.output_scale, "enc_layer_output_scale.weight": block.text_scale}
    yield from ((name, (1,)) for name, is_there in factors.items() if is_there)


def _altup(altup: AltUp, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _norm("altup_router_norm", altup.norm, width)
    yield "altup_router.weight", (altup.streams, width)
    yield "altup_predict_coef.weight", (altup.streams**2, altup.streams)
    yield "altup_correct_coef.weight", (altup.streams, altup.streams)
    if altup.correct_scale:
        yield "altup_correct_scale.weight", (width,)


def _per_layer_embedding(embedding: PerLayerEmbedding, num_layers: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield "per_layer_token_embd.weight", (embedding.vocab_size, num_layers * embedding.length)
    yield "per_layer_model_proj.weight", (num_layers * embedding.length, width)
    yield from _norm("per_layer_proj_norm", embedding.norm, embedding.length)


def _attention(attention: Attention, width: int) -> Iterator[tuple[str, Shape]]:
    q, kv = (count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads))
    own = (("attn_q", q),) if attention.kv_source is not None else (("attn_q", q), ("attn_k", kv), ("attn_v", kv))
    for name, rows in own:
        yield from _matrix(name, rows, width, attention.qkv_bias)
    yield from _matrix("attn_output", width, q, attention.output_bias)
    if attention.output_gate:
        yield from _matrix("attn_gate", q, width, attention.qkv_bias)
    if attention.sinks:
        yield "attn_sinks.weight", (attention.num_heads,)
    if attention.qk_norm is not None:
        is_row = attention.qk_norm_span == "row"
        yield from _norm("attn_q_norm", attention.qk_norm, q if is_row else attention.head_dim)
        if attention.kv_source is None:
            yield from _norm("attn_k_norm", attention.qk_norm, kv if is_row else attention.head_dim)


def _latent_attention(layer: LatentAttention, width: int) -> Iterator[tuple[str, Shape]]:
    q = layer.num_heads * (layer.nope_dim + layer.rope_dim)
    if layer.query_rank is None:
        yield "attn_q.weight", (q, width)
    else:
        yield "attn_q_a.weight", (layer.query_rank, width)
        yield from _norm("attn_q_a_norm", layer.norm, layer.query_rank)
        yield "attn_q_b.weight", (q, layer.query_rank)
    yield "attn_kv_a_mqa.weight", (layer.row_dim, width)
    yield from _norm("attn_kv_a_norm", layer.norm, layer.rank)
    yield "attn_k_b.weight", (layer.num_heads, layer.rank, layer.nope_dim)
    yield "attn_v_b.weight", (layer.num_heads, layer.value_dim, layer.rank)
    yield "attn_output.weight", (width, layer.num_heads * layer.value_dim)


def _gated_delta_net(layer: GatedDeltaNet, width: int) -> Iterator[tuple[str, Shape]]:
    values, channels = layer.num_value_heads * layer.value_dim, conv_channels(layer)
    for name, rows in (("attn_qkv", channels), ("attn_gate", values)):
        yield f"{name}.weight", (rows, width)
    for name in ("ssm_beta", "ssm_alpha"):
        yield f"{name}.weight", (layer.num_value_heads, width)
    yield "ssm_conv1d.weight", (channels, layer.kernel)
    yield "ssm_dt.bias", (layer.num_value_heads,)
    yield "ssm_a", (layer.num_value_heads,)
    yield from _norm("ssm_norm", layer.norm, layer.value_dim)
    yield "ssm_out.weight", (width, values)


def _short_conv(layer: ShortConv, width: int) -> Iterator[tuple[str, Shape]]:
    yield "shortconv.in_proj.weight", (3 * layer.width, width)
    yield "shortconv.conv.weight", (layer.width, layer.kernel)
    yield "shortconv.out_proj.weight", (width, layer.width)


def _mamba2(layer: Mamba2, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _matrix("ssm_in", layer.inputs, width, layer.bias)
    yield "ssm_conv1d.weight", (conv_channels(layer), layer.kernel)
    if layer.conv_bias:
        yield "ssm_conv1d.bias", (conv_channels(layer),)
    for name in ("ssm_dt.bias", "ssm_a", "ssm_d"):
        yield name, (layer.num_heads,)
    if layer.norm is not None:
        yield from _norm("ssm_norm", layer.norm, layer.values)
    yield from _matrix("ssm_out", width, layer.values, layer.output_bias)


def _mamba(layer: Mamba, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _matrix("ssm_in", 2 * layer.width, width, layer.bias)
    yield "ssm_conv1d.weight", (layer.width, layer.kernel)
    if layer.conv_bias:
        yield "ssm_conv1d.bias", (layer.width,)
    yield "ssm_x.weight", (layer.rank + 2 * layer.state_dim, layer.width)
    yield from _matrix("ssm_dt", layer.width, layer.rank, bias=True)
    yield "ssm_a", (layer.width, layer.state_dim)
    yield "ssm_d", (layer.width,)
    yield from _matrix("ssm_out", width, layer.width, layer.bias)


def _feed_forward(ffn: FeedForward, width: int) -> Iterator[tuple[str, Shape]]:
    if not ffn.hidden:
        return
    for name in ("ffn_gate", "ffn_up") if ffn.gated else ("ffn_up",):
        yield from _matrix(name, ffn.hidden, width, ffn.bias)
    yield from _matrix("ffn_down", width, ffn.hidden, ffn.bias)


def _experts(moe: MixtureOfExperts, width: int) -> Iterator[tuple[str, Shape]]:
    yield "ffn_gate_inp.weight", (moe.num_experts, width)
    if moe.gated:
        yield "ffn_gate_exps.weight", (moe.num_experts, moe.hidden, width)
    yield "ffn_up_exps.weight", (moe.num_experts, moe.hidden, width)
    yield "ffn_down_exps.weight", (moe.num_experts, width, moe.hidden)
    if moe.expert_bias:
        if moe.gated:
            yield "ffn_gate_exps.bias", (moe.num_experts, moe.hidden)
        yield "ffn_up_exps.bias", (moe.num_experts, moe.hidden)
        yield "ffn_down_exps.bias", (moe.num_experts, width)
    if moe.router_bias:
        yield "ffn_gate_inp.bias", (moe.num_experts,)
    if moe.selection_bias:
        yield "exp_probs_b.bias", (moe.num_experts,)
    if moe.expert_scale:
        yield "ffn_down_exps.scale", (moe.num_experts,)
    if moe.output_bias:
        yield "ffn_exps.bias", (width,)
    if moe.shared is not None:
        yield from _shared_expert(moe.shared, width, moe.gated)


def _shared_expert(shared: SharedExpert, width: int, gated: bool) -> Iterator[tuple[str, Shape]]:
    if gated:
        yield "ffn_gate_shexp.weight", (shared.hidden, width)
    yield "ffn_up_shexp.weight", (shared.hidden, width)
    yield "ffn_down_shexp.weight", (width, shared.hidden)
    if shared.gate:
        yield "ffn_gate_inp_shexp.weight", (width,)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
