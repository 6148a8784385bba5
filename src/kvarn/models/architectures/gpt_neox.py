"""GPT-NeoX and Pythia: parallel blocks with two layer norms, biases, Q, K and V of each head stored as one."""

from __future__ import annotations

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import RowRange, ViewEntry, WeightView
from kvarn.formats.weights import TensorInfo
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, layer_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GPT-NeoX."""
    dims, norm = read_dimensions(hparams), layer_norm(hparams, has_bias=True)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    has_bias = hparams.flag(None, "attention_bias", default=True)
    is_parallel = hparams.flag("use_parallel_residual", "use_parallel_residual", default=True)
    activation = hparams.activation("gelu")
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=FeedForward(dims.hidden[layer], activation, gated=False, bias=True),
            norm=norm,
            placement="parallel" if is_parallel else "pre",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def split_heads(spec: ModelSpec, view: WeightView) -> WeightView:
    """Gather the rows of Q, K and V, which safetensors hold head by head; GGUF holds them one after the other."""
    if view.metadata.get("hf") is None:
        return view
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        heads, size = block.attention.num_heads, block.attention.head_dim
        for suffix in ("weight", "bias"):
            fused = entries.pop(f"blk.{layer}.attn_qkv.{suffix}", None)
            if fused is None:
                continue
            if fused.info.shape[0] != 3 * heads * size:
                raise FormatError(f"tensor {fused.info.name} has shape {fused.info.shape}; expected {3 * heads * size}")
            (whole,) = fused.parts
            for place, part in enumerate("qkv"):
                rows = (RowRange(whole.tensor, (3 * head + place) * size, size) for head in range(heads))
                info = TensorInfo(
                    f"blk.{layer}.attn_{part}.{suffix}", fused.info.type, (heads * size, *fused.info.shape[1:])
                )
                entries[info.name] = ViewEntry(info, tuple(rows))
    return WeightView(view.source, entries)
