"""Mamba-2: every layer is a state space and nothing else. And what its hybrids share with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvarn.formats.tensor_view import ViewEntry, WeightView, changed
from kvarn.models.architectures.qwen3_next import flatten_conv
from kvarn.models.dimensions import state_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.recurrent import recurrent_of
from kvarn.models.spec import Block, FeedForward, ModelSpec, Norm
from kvarn.models.spec_builder import decoder
from kvarn.models.state_layers import Mamba, Mamba2

# How many rows others compute together, and in which type; the rank is Mamba-1's.
WAYS_OF_COMPUTING = ("chunk_size", "mamba_chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank")
NO_FEED_FORWARD = FeedForward(0, "silu")


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Mamba-2."""
    dims, norm = state_dimensions(hparams), state_norm(hparams)
    layer = replace(read_mamba2(hparams, dims.width), norm=norm)
    if not hparams.is_gguf and layer.head_dim != hparams.integer("head_dim", default=layer.head_dim):
        raise hparams.format_error(
            f"{layer.num_heads} heads of head_dim are not the {layer.values} values of expand * hidden_size"
        )
    block = Block(mixer=layer, feed_forward=NO_FEED_FORWARD, norm=norm)
    return decoder(hparams, dims, (block,) * dims.num_layers, norm)


def state_norm(hparams: HParams) -> Norm:
    """Of layers and of what they compute, which have the same epsilon."""
    return Norm("rms", hparams.number("rms_norm_eps" if hparams.is_gguf else "layer_norm_eps"))


def read_mamba2(hparams: HParams, width: int, layer: int = 0) -> Mamba2:
    """Read the shape of the state spaces of a model, of which `layer` is one; without a norm."""
    heads, groups = hparams.integer("num_state_heads"), hparams.integer("num_state_key_heads", default=1)
    values = hparams.integer("state_inner", default=None)
    if values is None:
        each = hparams.integer("state_head_dim", default=None)
        values = hparams.integer("state_expand") * width if each is None else each * heads
    each = hparams.raw(None, "mamba_d_head")
    if values % heads or heads % groups or each not in (None, "auto", values // heads):
        raise hparams.format_error(f"{values} values, {heads} heads and {groups} groups do not divide each other")
    require_silu(hparams)
    hparams.raw(None, "mamba_expand")  # where the values are given
    for key in WAYS_OF_COMPUTING:
        hparams.raw(None, key)
    low, high = _step_limits(hparams)
    return Mamba2(
        num_heads=heads,
        head_dim=values // heads,
        num_groups=groups,
        state_dim=hparams.integer("state_key_dim"),
        kernel=hparams.integer("conv_kernel"),
        norm=None,
        conv_bias=has_part(hparams, f"blk.{layer}.ssm_conv1d.bias", "use_conv_bias", "mamba_conv_bias"),
        bias=has_part(hparams, f"blk.{layer}.ssm_in.bias", "use_bias", "mamba_proj_bias"),
        output_bias=has_part(hparams, f"blk.{layer}.ssm_out.bias", "use_bias", "projectors_bias", "mamba_proj_bias"),
        min_step=low,
        max_step=high,
    )


def has_part(hparams: HParams, tensor: str, *keys: str) -> bool:
    """GGUF says it by the tensor, config.json by the first of these keys that the model type has."""
    if hparams.is_gguf:
        return hparams.has_some(tensor.split(".", 2)[2])
    return hparams.flag(None, next(key for key in keys if hparams.has_key(key)), default=False)


def require_silu(hparams: HParams) -> None:
    key = "mamba_hidden_act" if hparams.has_key("mamba_hidden_act") else "hidden_act"
    if hparams.raw(None, key) not in (None, "silu", "swish"):
        raise hparams.unsupported(f"{key} is not silu; state spaces have no other", key)


def _step_limits(hparams: HParams) -> tuple[float, float | None]:
    given = hparams.raw(None, "time_step_limit")
    if given is None:
        return 0.0, None
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise hparams.format_error(f"time_step_limit is {given!r:.60}; expected two numbers")
    low, high = (_number(hparams, one) for one in given)
    return low, None if high == float("inf") else high


def _number(hparams: HParams, given: Any) -> float:
    """JSON has no infinity: transformers writes it as a table of its own."""
    value = given.get("__float__") if isinstance(given, dict) else given
    value = float("inf") if value in ("Infinity", "inf") else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise hparams.format_error(f"time_step_limit has {given!r:.60}; expected a number from 0 on")
    return float(value)


def is_state_space(hparams: HParams, kind: object) -> bool:
    """Whether a layer is a state space, and no attention; both have two names."""
    if kind not in ("mamba", "linear_attention", "attention", "full_attention"):
        known = "mamba, linear_attention, attention, full_attention"
        raise hparams.unsupported(f"a layer is {kind!r:.60}; known are {known}", "layer_types")
    return kind in ("mamba", "linear_attention")


def flatten_states(spec: ModelSpec, view: WeightView) -> WeightView:
    """Vectors that GGUF has as matrices, kernels of three axes, and decays that safetensors have as logarithms."""
    entries = dict(view.entries)
    for index, block in enumerate(spec.blocks):
        layer, stem = recurrent_of(block), f"blk.{index}."
        if not isinstance(layer, Mamba2 | Mamba):
            continue
        flatten_conv(entries, f"{stem}ssm_conv1d.weight")
        if entry := entries.pop(f"{stem}ssm_a_log", None):
            entry = changed(entry, lambda values: -np.exp(values))
            entries[f"{stem}ssm_a"] = replace(entry, info=replace(entry.info, name=f"{stem}ssm_a"))
        names = ("ssm_a", "ssm_d", "ssm_norm.weight") if isinstance(layer, Mamba2) else ("ssm_d",)
        for name in names:
            _flatten(entries, f"{stem}{name}")
    return WeightView(view.source, entries)


def _flatten(entries: dict[str, ViewEntry], name: str) -> None:
    entry = entries.get(name)
    if entry is not None and len(entry.info.shape) == 2:
        entries[name] = replace(entry, info=replace(entry.info, shape=(entry.info.num_values,)))
