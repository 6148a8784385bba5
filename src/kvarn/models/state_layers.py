"""Parts of a ModelSpec: layers whose state leads from token to token, in the place of attention or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.models.spec import Norm


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention: each value head of a sequence has a state S (key_dim, value_dim), no keys and values.

    Tensors attn_qkv, attn_gate, ssm_beta, ssm_alpha, ssm_out (matrices), ssm_conv1d (channels, kernel),
    ssm_dt.bias, ssm_a (value heads) and ssm_norm (value_dim).
    q, k, v = silu(conv(attn_qkv(x))): by channel, the last kernel rows times conv1d, oldest first, 0 before the first;
    q = unit(q) / sqrt(key_dim), k = unit(k), with unit(y) = y / sqrt(sum(y * y) + 1e-6), for each head
    S *= exp(ssm_a * softplus(ssm_alpha(x) + ssm_dt)); S += k (v - k S) * sigmoid(ssm_beta(x)); o = q S
    out = ssm_out(norm(o) * silu(attn_gate(x))), norm for each head
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: Norm
    tiled: bool = False  # value head h reads key head h % num_key_heads; otherwise neighbours share one


@dataclass(frozen=True, slots=True)
class ShortConv:
    """b, c, v = shortconv.in_proj(x); out = shortconv.out_proj(c * conv(b * v)), conv by channel as in GatedDeltaNet.

    Tensors shortconv.in_proj (3 * width, width), shortconv.conv (width, kernel), shortconv.out_proj (width, width).
    """

    width: int
    kernel: int


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space of one decay for each head: a head of a sequence has a state S (state_dim, head_dim).

    Tensors ssm_in and ssm_out (.weight, .bias if bias, output_bias), ssm_conv1d.weight (channels, kernel) and .bias,
    ssm_dt.bias, ssm_a, ssm_d (heads), ssm_norm (heads * head_dim). Neighbouring heads share B and C of their group.
    z, y, dt = ssm_in(x): heads * head_dim, channels, heads; v, B, C = silu(conv(y)), by channel as in GatedDeltaNet
    t = clip(softplus(dt + ssm_dt), min_step, max_step); S = exp(ssm_a * t) * S + B v * t; o = C S + ssm_d * v
    out = ssm_out(norm(o * silu(z))), the norm over the heads of each group; of norm_first norm(o) * silu(z)
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int
    norm: Norm | None
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    norm_first: bool = False
    min_step: float = 0.0
    max_step: float | None = None

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def inputs(self) -> int:
        """Rows of ssm_in."""
        return 2 * self.values + 2 * self.num_groups * self.state_dim + self.num_heads


@dataclass(frozen=True, slots=True)
class Mamba:
    """A state space of one decay for each value of the state: a channel of a sequence has a state of state_dim values.

    Tensors ssm_in, ssm_out (.weight, .bias if bias), ssm_conv1d.weight (width, kernel) and .bias, ssm_x
    (rank + 2 * state_dim, width), ssm_dt.weight (width, rank) and .bias, ssm_a (width, state_dim), ssm_d (width).
    y, z = ssm_in(x); v = silu(conv(y)), conv by channel as in GatedDeltaNet; r, B, C = ssm_x(v)
    t = softplus(ssm_dt(r)); S = exp(ssm_a * t) * S + B v * t, for each channel; o = C S + ssm_d * v
    out = ssm_out(o * silu(z)); parameter_norm_eps: r, B and C are each divided by their rms
    """

    width: int
    state_dim: int
    rank: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    parameter_norm_eps: float | None = None


@dataclass(frozen=True, slots=True)
class NoMixer:
    """Nothing: the layer is its feed-forward alone, and has no attn_norm."""
