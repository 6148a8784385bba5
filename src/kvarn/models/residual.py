"""Parts of a ModelSpec: what the residual stream has beside attention and feed-forward, and where there are several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.models.spec import Activation, Norm


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """What each layer gets of a token beside x, `length` values of a row for each layer, the first layer's first:

    (per_layer_token_embd[token] * sqrt(length) + norm(per_layer_model_proj(x) / sqrt(width))) / sqrt(2)
    with x as it enters the first layer, and per_layer_proj_norm (length) for each layer; row 0 for a token that the
    table lacks.
    """

    length: int
    vocab_size: int
    norm: Norm


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """x += post_norm(proj(act(inp_gate(x)) * e)) behind the feed-forward; e: the layer's part of PerLayerEmbedding.

    Tensors inp_gate (length, width), proj (width, length) and post_norm.
    """

    length: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several residual streams x_i of one width, of which a layer computes the active one, x_a, and guesses the others.

    x_0 is what is embedded, x_i = altup_proj[i - 1](x_0), made as long as x_0. A layer:
    m(y) = tanh(altup_router(altup_router_norm(y) / width))                                        (streams)
    p_i = x_i + sum_j c[i, j] x_j with c = altup_predict_coef(m(x_a))                               (streams, streams)
    y = the layer's sublayers of p_a; x_i = p_i + (y - p_a) * (1 + altup_correct_coef(m(y))[i])
    The layer's own input is made of x_a * altup_correct_scale, where there is one, and added to all but x_0.
    The output norm reads the mean of x_0 and altup_unembd_proj[i - 1](x_i), these made as long as x_0.
    As long: times rms(x_0) / sqrt(max(mean of squares, 1e-5)).
    """

    streams: int
    active: int
    norm: Norm
    correct_scale: bool = True
