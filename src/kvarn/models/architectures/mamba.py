"""Mamba and Falcon-Mamba: every layer is a state space whose steps, B and C are made of its own convolution."""

from __future__ import annotations

from kvarn.models.architectures.mamba2 import (
    NO_FEED_FORWARD,
    WAYS_OF_COMPUTING,
    has_part,
    require_silu,
    state_norm,
)
from kvarn.models.dimensions import state_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import decoder
from kvarn.models.state_layers import Mamba


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Mamba."""
    dims, norm = state_dimensions(hparams), state_norm(hparams)
    width = hparams.integer("state_inner", default=None) or hparams.integer("state_expand") * dims.width
    given = hparams.raw(None, "intermediate_size")
    if given not in (None, width):
        raise hparams.unsupported(f"intermediate_size is {given!r:.20}, not expand * hidden_size", "intermediate_size")
    require_silu(hparams)
    for key in WAYS_OF_COMPUTING:
        hparams.raw(None, key)
    layer = Mamba(
        width=width,
        state_dim=hparams.integer("state_key_dim"),
        rank=_rank(hparams, dims.width),
        kernel=hparams.integer("conv_kernel"),
        conv_bias=has_part(hparams, "blk.0.ssm_conv1d.bias", "use_conv_bias"),
        bias=has_part(hparams, "blk.0.ssm_in.bias", "use_bias"),
        parameter_norm_eps=_parameter_norm_eps(hparams, norm.eps),
    )
    block = Block(mixer=layer, feed_forward=NO_FEED_FORWARD, norm=norm)
    return decoder(hparams, dims, (block,) * dims.num_layers, norm)


def _rank(hparams: HParams, width: int) -> int:
    """auto is a sixteenth of the width."""
    if hparams.raw("ssm.time_step_rank", "time_step_rank") in (None, "auto"):
        return -(-width // 16)
    rank: int = hparams.integer("step_rank")
    return rank


def _parameter_norm_eps(hparams: HParams, eps: float) -> float | None:
    if hparams.is_gguf:
        return eps if hparams.flag("ssm.dt_b_c_rms", "", default=False) else None
    return hparams.number("parameter_norm_eps") if hparams.has_key("mixer_rms_eps") else None
