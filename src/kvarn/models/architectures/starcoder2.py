"""StarCoder2: layer norms, biases everywhere, a feed-forward without a gate."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm, one_window


def describe(hparams: HParams) -> ModelSpec:
    """Describe a StarCoder2; GGUF says by tensors whether there are biases."""
    dims, norm = read_dimensions(hparams), layer_norm(hparams, has_bias=True)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    has_bias = hparams.has_tensor("blk.0.attn_q.bias")
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "use_bias", default=True)
    window, activation = one_window(hparams, dims), hparams.activation("gelu_tanh")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=window, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=has_bias),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
