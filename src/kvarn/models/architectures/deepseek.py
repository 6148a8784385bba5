"""DeepSeek-V2, V3 and R1, Kimi K2 and GLM-4.7-Flash: latent attention and experts in groups, behind dense layers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kvarn.checks import short
from kvarn.errors import FormatError
from kvarn.formats.tensor_view import ViewEntry, WeightView, changed, gathered
from kvarn.models.architectures.draft_layer import draft_block
from kvarn.models.architectures.glm4_moe import SIGMOID, check_groups, drop_draft_layers, without_draft_layers
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.config.rope_entries import rope_entries, scaling_kind
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams, text_config
from kvarn.models.rope import gguf_magnitude, read_rope
from kvarn.models.spec import (
    Block,
    ExpertGroups,
    FeedForward,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Rope,
    SharedExpert,
)
from kvarn.models.spec_builder import decoder, rms_norm

LATENT_EPS = 1e-6  # of the norms within the attention, whatever config.json says of the others; GGUF has one for all
SOFTMAX = 1  # GGUF's number of this scoring function
SOFTMAX_METHODS = ("greedy", "group_limited_greedy")
KINDS = ("dense", "sparse")


def describe(hparams: HParams) -> ModelSpec:
    """Describe a model with latent attention and experts."""
    dims = without_draft_layers(hparams, latent_dimensions(hparams))
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # those that draft tokens ahead are left out
        hparams.raw(None, name)
    is_half = hparams.has_key("rope_interleave") and not hparams.flag(None, "rope_interleave", default=True)
    attention, norm = latent_attention(hparams, dims, is_half=is_half), rms_norm(hparams)
    is_sparse = sparse_layers(hparams, dims)
    has_experts = any(is_sparse) or hparams.integer("num_experts", default=0) > 0
    experts = _experts(hparams, dims.num_layers) if has_experts else None  # read also where every layer is dense
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=experts
            if experts is not None and is_sparse[layer]
            else FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return replace(decoder(hparams, dims, blocks, norm), draft=draft_block(hparams, blocks))


def latent_dimensions(hparams: HParams) -> Dimensions:
    """Read the dimensions; every head has keys of its own, but GGUF may count the one row that is cached."""
    dims = read_dimensions(hparams, head_dim=hparams.integer("latent_rope_dim"))
    for layer, (heads, kv_heads) in enumerate(zip(dims.num_heads, dims.num_kv_heads, strict=True)):
        if heads != dims.num_heads[0] or kv_heads not in (heads, 1 if hparams.is_gguf else heads):
            raise hparams.format_error(f"layer {layer} has {heads} heads and {kv_heads} KV heads; expected as many")
    return dims


def latent_attention(hparams: HParams, dims: Dimensions, *, is_half: bool) -> LatentAttention:
    """Read the attention that all layers have. is_half: it rotates halves and not neighbours."""
    rope_dim, rank = dims.head_dim, hparams.integer("latent_rank")
    nope_dim, value_dim = _head_dims(hparams, dims, rank)
    rope = read_rope(hparams, "half" if is_half else "interleaved", rope_dim, dims.context_length)
    if 2 * len(rope.inverse_frequencies) != rope_dim:
        raise hparams.unsupported(
            f"rope rotates {2 * len(rope.inverse_frequencies)} of the {rope_dim} dimensions", "partial_rotary_factor"
        )
    scale, rope = _stretched(hparams, dims, rope)
    return LatentAttention(
        num_heads=dims.num_heads[0],
        query_rank=hparams.integer("query_rank", default=None),
        rank=rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        scale=scale / math.sqrt(nope_dim + rope_dim),
        rope=rope,
        norm=rms_norm(hparams) if hparams.is_gguf else Norm("rms", LATENT_EPS),
    )


def _head_dims(hparams: HParams, dims: Dimensions, rank: int) -> tuple[int, int]:
    """Dimensions of a head that are not rotated, and of its values.

    GGUF has the size of a head in key_length_mla, or, in files with attn_kv_b, in key_length.
    """
    rope_dim, usual = dims.head_dim, dims.width // dims.num_heads[0]
    if not hparams.is_gguf:
        nope_dim = hparams.integer("latent_nope_dim")
        _check_sums(hparams, {"head_dim": rope_dim, "qk_head_dim": nope_dim + rope_dim})
        return nope_dim, hparams.integer("latent_value_dim", default=usual)
    key_dim, value_dim = hparams.integer("head_dim"), hparams.integer("value_dim", default=usual)
    if (own := hparams.integer("latent_key_dim", default=None)) is not None:
        if (key_dim, value_dim) != (rank + rope_dim, rank):
            raise hparams.format_error(
                f"key_length and value_length are {key_dim} and {value_dim}; expected {rank + rope_dim} and {rank}"
            )
        key_dim, value_dim = own, hparams.integer("latent_value_dim")
    if key_dim <= rope_dim:
        raise hparams.format_error(f"a head has {key_dim} dimensions, {rope_dim} of them rotated; expected more")
    return key_dim - rope_dim, value_dim


def _check_sums(hparams: HParams, known: dict[str, int]) -> None:
    """Refuse a config.json with sizes other than those that follow from the parts of a head."""
    config = text_config(hparams.weights.metadata["hf"])
    for name, value in known.items():
        hparams.raw(None, name)
        if config.get(name) not in (None, value):
            raise hparams.unsupported(f"{name} is {short(config[name])}; {value} is known", name)


def _stretched(hparams: HParams, dims: Dimensions, rope: Rope) -> tuple[float, Rope]:
    """What YaRN multiplies the scores by, and the rope. GGUF has a tenth of mscale_all_dim, which mscale is, too."""
    table = rope_entries(hparams, "full_attention", dims.context_length)
    if scaling_kind(hparams, table) != "yarn":
        return 1.0, rope
    factor = hparams.number("rope_factor", table=table)
    if hparams.is_gguf:
        weight = 10 * hparams.number("rope_log_multiplier", default=0.0)
        rope = replace(rope, magnitude=gguf_magnitude(hparams)) if weight else rope
    else:
        weight = hparams.number("rope_mscale_all_dim", default=0.0, table=table)
    magnitude = 1.0 + 0.1 * weight * math.log(factor) if factor > 1.0 else 1.0
    return magnitude**2, rope


def sparse_layers(hparams: HParams, dims: Dimensions) -> tuple[bool, ...]:
    """Which layers have experts: all behind the first dense ones, or as config.json says by layer."""
    kinds = hparams.raw(None, "mlp_layer_types")
    if kinds is None:
        num_dense = hparams.integer("num_dense_layers", default=1 if hparams.has_key("mlp_layer_types") else 0)
        return tuple(layer >= num_dense for layer in range(dims.num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != dims.num_layers or any(one not in KINDS for one in kinds):
        raise hparams.format_error(f"mlp_layer_types is {short(kinds)}; expected {' or '.join(KINDS)} for each layer")
    hparams.raw(None, "first_k_dense_replace")  # the list has the say
    return tuple(kind == "sparse" for kind in kinds)


def _experts(hparams: HParams, num_layers: int) -> MixtureOfExperts:
    is_sigmoid = _scores_by_sigmoid(hparams)
    hidden, num_shared = hparams.integer("expert_hidden"), hparams.integer("num_shared_experts", default=0)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=False)
    if renormalise and not is_sigmoid:
        raise hparams.unsupported("norm_topk_prob is true for experts scored by softmax", "norm_topk_prob")
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    count, num_active = (hparams.integer(name, default=1) for name in ("num_groups", "num_active_groups"))
    # By the softmax a group is as good as its best expert, with biases as its two best.
    groups = ExpertGroups(count, num_active, num_judged=2 if is_sigmoid else 1)
    if is_sigmoid or hparams.raw(None, "topk_method") != "greedy":
        check_groups(hparams, experts, groups)
    else:
        groups = ExpertGroups(1, 1)
    has_bias = any(hparams.has_tensor(f"blk.{layer}.exp_probs_b.bias") for layer in range(num_layers))
    return replace(
        experts,
        scoring="sigmoid" if is_sigmoid else "softmax",
        selection_bias=is_sigmoid and (has_bias or not hparams.is_gguf),
        scale=hparams.number("expert_scale", default=1.0),
        groups=groups if groups.count > 1 else None,
        shared=SharedExpert(hidden * num_shared) if num_shared else None,
    )


def _scores_by_sigmoid(hparams: HParams) -> bool:
    """By what experts are chosen: config.json names it twice, as a function and as a method."""
    given = hparams.raw("expert_gating_func", "scoring_func")
    if hparams.is_gguf:
        if given not in (None, 0, SOFTMAX, SIGMOID):
            raise hparams.unsupported(f"expert_gating_func is {short(given)}; 1 and 2 are known", "expert_gating_func")
        return bool(given == SIGMOID)
    is_sigmoid = hparams.architecture != "deepseek_v2"
    known = ("sigmoid",) if is_sigmoid else ("softmax",)
    methods = ("noaux_tc",) if is_sigmoid else SOFTMAX_METHODS
    for name, value, values in (
        ("scoring_func", given, known),
        ("topk_method", hparams.raw(None, "topk_method"), methods),
    ):
        if value is not None and value not in values:
            raise hparams.unsupported(f"{name} is {short(value)}; known are {', '.join(values)}", name)
    return is_sigmoid


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out layers that draft tokens ahead, and cut attn_kv_b, which files of the first form have."""
    return cut_latents(spec, drop_draft_layers(spec, view))


def cut_latents(spec: ModelSpec, view: WeightView) -> WeightView:
    """Make attn_k_b, turned round, and attn_v_b of attn_kv_b: its rows are of each head the keys', then the values'."""
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        entry = entries.pop(f"blk.{layer}.attn_kv_b.weight", None)
        if entry is None:
            continue
        assert isinstance(block.mixer, LatentAttention), "all layers of these models have it"
        for one in _cut(entry, f"blk.{layer}.", block.mixer):
            if one.info.name in entries:
                raise FormatError(f"tensor {one.info.name} is stored twice, alone and within attn_kv_b", file=view.path)
            entries[one.info.name] = one
    return WeightView(view.source, entries)


def _cut(entry: ViewEntry, stem: str, layer: LatentAttention) -> tuple[ViewEntry, ViewEntry]:
    size, heads = layer.nope_dim + layer.value_dim, range(layer.num_heads)
    if entry.info.shape != (layer.num_heads * size, layer.rank):
        wanted = (layer.num_heads * size, layer.rank)
        raise FormatError(f"tensor {entry.info.name} has shape {entry.info.shape}; expected {wanted}")
    keys = gathered(entry, f"{stem}attn_k_b.weight", [(head * size, layer.nope_dim) for head in heads])
    values = gathered(
        entry, f"{stem}attn_v_b.weight", [(head * size + layer.nope_dim, layer.value_dim) for head in heads]
    )
    shape = (layer.num_heads, layer.nope_dim, layer.rank)
    turned = changed(keys, lambda stored: np.ascontiguousarray(stored.reshape(shape).swapaxes(1, 2)))
    return (
        replace(turned, info=replace(turned.info, shape=(layer.num_heads, layer.rank, layer.nope_dim))),
        replace(values, info=replace(values.info, shape=(layer.num_heads, layer.value_dim, layer.rank))),
    )
