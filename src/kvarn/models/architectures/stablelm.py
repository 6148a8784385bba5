"""StableLM: layer norms, a rotated quarter of each head, and for some one norm for both halves of a parallel block."""

from __future__ import annotations

from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a StableLM. In GGUF a parallel block is one without a second norm."""
    dims, norm = read_dimensions(hparams), layer_norm(hparams, has_bias=True)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    has_bias = hparams.has_tensor("blk.0.attn_q.bias")
    is_parallel = not hparams.has_tensor("blk.0.ffn_norm.weight")
    hparams.raw("use_parallel_residual")  # llama.cpp goes by the tensors too
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "use_qkv_bias", default=False)
        is_parallel = hparams.flag(None, "use_parallel_residual", default=False)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
            placement="parallel" if is_parallel else "pre",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
