"""Nemotron-H: every layer is one thing alone, a state space, attention, a feed-forward or experts, none of them gated
and nothing rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.glm4_moe import check_groups
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.mamba2 import NO_FEED_FORWARD, flatten_states, is_state_space, read_mamba2, state_norm
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, ExpertGroups, FeedForward, MixtureOfExperts, ModelSpec, Norm, SharedExpert
from kvarn.models.spec_builder import decoder
from kvarn.models.state_layers import NoMixer

Kind = Literal["mamba", "attention", "mlp", "moe"]
LETTERS: dict[str, Kind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}

# Layers that draft tokens ahead are left out; the others are ways of computing.
UNUSED = ("num_nextn_predict_layers", "mtp_layers_block_type", "moe_shared_expert_overlap", "use_mamba_kernels")
OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("routed_scaling_factor", "n_group", "topk_group"),
)


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Nemotron-H, dense or with experts."""
    kinds, norm = _kinds(hparams), state_norm(hparams)
    dims = read_dimensions(hparams, hidden=0, some_without_heads=True, num_layers=len(kinds) if kinds else None)
    kinds = kinds or _gguf_kinds(hparams, dims)
    for key in UNUSED if "moe" in kinds else (*UNUSED, *OF_EXPERTS):
        hparams.raw(None, key)
    blocks = tuple(_block(hparams, dims, layer, kind, norm) for layer, kind in enumerate(kinds))
    return decoder(hparams, dims, blocks, norm)


def _block(hparams: HParams, dims: Dimensions, layer: int, kind: Kind, norm: Norm) -> Block:
    if kind == "mamba":
        low = 0.0 if hparams.is_gguf else hparams.number("least_step")  # for time_step_limit nobody asks there
        state = replace(read_mamba2(hparams, dims.width, layer), norm=norm, min_step=low, max_step=None)
        return Block(mixer=state, feed_forward=NO_FEED_FORWARD, norm=norm)
    if kind == "attention":
        return Block(mixer=dims.attention(layer, None), feed_forward=NO_FEED_FORWARD, norm=norm)
    if kind == "moe":
        return Block(mixer=NoMixer(), feed_forward=_experts(hparams), norm=norm)
    bias = hparams.has_tensor(f"blk.{layer}.ffn_up.bias")
    bias = bias if hparams.is_gguf else hparams.flag(None, "mlp_bias", default=False)
    ffn = FeedForward(dims.hidden[layer], hparams.activation("relu2"), gated=False, bias=bias)
    return Block(mixer=NoMixer(), feed_forward=ffn, norm=norm)


def _experts(hparams: HParams) -> MixtureOfExperts:
    if hparams.raw("moe_latent_size", "moe_latent_size") is not None:
        raise hparams.unsupported("experts read a projection of their own (moe_latent_size)", "moe_latent_size")
    if hparams.flag(None, "mlp_bias", default=False):
        raise hparams.unsupported("mlp_bias is true in a model with experts", "mlp_bias")
    hparams.integer("num_shared_experts", default=1)  # all of them are one, of the size that is given
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=True)
    hidden, shared = hparams.integer("expert_hidden"), hparams.integer("shared_hidden")
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    groups = ExpertGroups(hparams.integer("num_groups", default=1), hparams.integer("num_active_groups", default=1))
    check_groups(hparams, experts, groups)
    return replace(
        experts,
        activation=hparams.activation("relu2"),
        gated=False,
        scoring="sigmoid",
        selection_bias=True,
        scale=hparams.number("expert_scale", default=1.0) or 1.0,
        groups=groups if groups.count > 1 else None,
        shared=SharedExpert(shared) if shared else None,
    )


def _gguf_kinds(hparams: HParams, dims: Dimensions) -> tuple[Kind, ...]:
    ffn: Kind = "moe" if hparams.integer("num_experts", default=0) else "mlp"
    pairs = zip(dims.num_kv_heads, dims.hidden, strict=True)
    return tuple("attention" if heads else ffn if hidden else "mamba" for heads, hidden in pairs)


def _kinds(hparams: HParams) -> tuple[Kind, ...] | None:
    """What config.json lists, by names or by letters; None of a GGUF file, whose sizes say it."""
    if hparams.is_gguf:
        return None
    pattern = hparams.raw(None, "hybrid_override_pattern")
    given = hparams.raw(None, "layers_block_type", "layer_types")
    if given is None and isinstance(pattern, str) and pattern and set(pattern) <= LETTERS.keys():
        return tuple(LETTERS[letter] for letter in pattern)
    if not isinstance(given, list | tuple) or not given:
        raise hparams.format_error(f"layers_block_type is {given!r:.60}; expected a kind for each layer")
    return tuple(_kind(hparams, one) for one in given)


def _kind(hparams: HParams, given: object) -> Kind:
    if given in ("mlp", "moe"):
        return "mlp" if given == "mlp" else "moe"
    return "mamba" if is_state_space(hparams, given) else "attention"


def rename(spec: ModelSpec, view: WeightView) -> WeightView:
    """The one norm of a layer is that of its feed-forward where there is nothing else."""
    view = flatten_states(spec, view)
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        if isinstance(block.mixer, NoMixer) and (entry := entries.pop(f"blk.{layer}.attn_norm.weight", None)):
            name = f"blk.{layer}.ffn_norm.weight"
            entries[name] = replace(entry, info=replace(entry.info, name=name))
    return WeightView(view.source, entries)
