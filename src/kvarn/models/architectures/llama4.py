"""Llama 4 (text): most layers attend within chunks, the others to everything and without rotary positions; experts that
weigh what they read, in all layers or some."""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.smollm3 import rotating_layers
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec, Norm, SharedExpert, Temperature
from kvarn.models.spec_builder import attention_biases, decoder, layer_kinds, rms_norm
from kvarn.models.tensors.fused import fill_vectors
from kvarn.models.tensors.turned_experts import turn_experts

CHUNK = 8192  # GGUF does not record it, nor what queries are tuned with
TUNING = (8192, 0.1)
WITHOUT_NORMS = 128  # experts of the model whose queries and keys are not normed: GGUF does not say it otherwise


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Llama 4."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    hidden = hparams.integer("expert_hidden", default=dims.hidden[0])
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=False)
    experts = replace(experts, scoring="sigmoid", weighs_input=True, shared=SharedExpert(hidden))
    dense = FeedForward(hparams.integer("dense_hidden"), hparams.activation("silu"))
    sparse, attentions = _sparse_layers(hparams, dims), _attentions(hparams, dims, norm, experts.num_experts)
    blocks = tuple(
        Block(mixer=attention, feed_forward=experts if layer in sparse else dense, norm=norm)
        for layer, attention in enumerate(attentions)
    )
    return decoder(hparams, dims, blocks, norm)


def _sparse_layers(hparams: HParams, dims: Dimensions) -> frozenset[int]:
    listed, interval = hparams.raw(None, "moe_layers"), hparams.integer("sparse_interval")
    if listed is None:
        return frozenset(range(interval - 1, dims.num_layers, interval))
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise hparams.format_error(f"moe_layers is {listed!r:.60}; expected numbers of layers")
    return frozenset(listed)


def _attentions(hparams: HParams, dims: Dimensions, norm: Norm, num_experts: int) -> list[Attention]:
    """Without chunks GGUF files have positions in every layer and no tuning."""
    chunk = hparams.integer("chunk", default=CHUNK if hparams.is_gguf else 0) or None
    is_plain = hparams.is_gguf and chunk is None
    rotates = (True,) * dims.num_layers if is_plain else rotating_layers(hparams, dims)
    chunked = layer_kinds(hparams, dims, () if is_plain else rotates, "chunked_attention", None)
    if any(chunked) and chunk is None:
        raise hparams.unsupported("layer_types names chunks, but attention_chunk_size has no size", "layer_types")
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    tuning = None if is_plain else _tuning(hparams)
    is_normed = hparams.flag(None, "use_qk_norm", default=num_experts != WITHOUT_NORMS)
    qkv_bias, output_bias = attention_biases(hparams)
    return [
        dims.attention(
            layer,
            rope if is_rotated else None,
            window=chunk if chunked and chunked[layer] else None,
            is_chunked=bool(chunked and chunked[layer]),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=norm if is_rotated and is_normed else None,
            qk_norm_after_rope=True,
            temperature=None if is_rotated else tuning,
        )
        for layer, is_rotated in enumerate(rotates)
    ]


def _tuning(hparams: HParams) -> Temperature | None:
    length, scale = (hparams.integer("tuning_length", TUNING[0]), hparams.number("tuning_scale", TUNING[1]))
    is_tuned = hparams.flag(None, "attn_temperature_tuning", default=True)
    return Temperature(length, scale, offset=1) if is_tuned else None


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """The experts of folders are turned; the norms of Q and K have no weights."""
    lengths = {
        f"blk.{layer}.attn_{part}_norm.weight": block.attention.head_dim
        for layer, block in enumerate(spec.blocks)
        for part in "qk"
        if block.attention.qk_norm is not None
    }
    return fill_vectors(turn_experts(spec, view), lengths)
