"""ERNIE 4.5: a Llama that rotates neighbours, in some models with biases everywhere, in others with experts."""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import decoder, rms_norm

LEAST_SHARE = 1e-6  # of all chosen experts, below which moe_norm_min matters


def describe(hparams: HParams) -> ModelSpec:
    """Describe an ERNIE 4.5, dense or with experts; GGUF says by tensors whether there are biases."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "interleaved", dims.head_dim, dims.context_length)
    has_bias = hparams.has_tensor("blk.0.attn_q.bias")
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "use_bias", default=False)
    dense = FeedForward(dims.hidden[0], hparams.activation("silu"), bias=has_bias)
    experts, sparse = _experts(hparams, has_bias), _sparse_layers(hparams, dims)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=experts if experts is not None and layer in sparse else dense,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _experts(hparams: HParams, has_bias: bool) -> MixtureOfExperts | None:
    if not hparams.architecture.endswith("moe"):
        return None
    if has_bias:
        raise hparams.unsupported("use_bias is true; experts with biases are unknown", "use_bias")
    if (least := hparams.number("least_share", default=0.0)) > LEAST_SHARE:
        raise hparams.unsupported(f"moe_norm_min is {least:g}; shares are divided by their sum here", "moe_norm_min")
    hidden, num_shared = hparams.integer("expert_hidden"), hparams.integer("num_shared_experts", default=0)
    hparams.integer("shared_hidden", default=0)  # of one of them, as the converter reckons it
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=True)
    shared = SharedExpert(num_shared * hidden) if num_shared else None
    return replace(experts, selection_bias=True, shared=shared)


def _sparse_layers(hparams: HParams, dims: Dimensions) -> frozenset[int]:
    """The layers with experts: from one on, up to one, every so many."""
    first, interval = hparams.integer("num_dense_layers", default=0), hparams.integer("sparse_interval", default=1)
    last = hparams.integer("last_sparse_layer", default=-1)
    last = dims.num_layers - 1 if last == -1 else last
    return frozenset(layer for layer in range(first, last + 1) if (layer + 1) % interval == 0)


def flatten_bias(spec: ModelSpec, view: WeightView) -> WeightView:
    """(1, experts) of safetensors is (experts)."""
    entries = dict(view.entries)
    for layer in range(len(spec.blocks)):
        entry = entries.get(f"blk.{layer}.exp_probs_b.bias")
        if entry is not None and entry.info.shape[:-1] == (1,):
            entries[entry.info.name] = replace(entry, info=replace(entry.info, shape=entry.info.shape[1:]))
    return WeightView(view.source, entries)
