"""Phi-3.5-MoE: a Llama with layer norms and biases, and experts that are taken one after the other (SparseMixer)."""

from __future__ import annotations

from dataclasses import replace

from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.config.rope_entries import rope_entries, scaling_kind
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, Head, ModelSpec, Norm, Rope
from kvarn.models.spec_builder import attention_biases, decoder, one_window

JITTER = 0.01  # of the published models; GGUF does not record it
NUM_ACTIVE = 2


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Phi-3.5-MoE; GGUF files are routed as the model was trained, too."""
    dims, norm = read_dimensions(hparams), Norm("layer", hparams.number("rms_norm_eps"), has_bias=True)
    rope = _rope(hparams, dims.head_dim, dims.context_length)
    window, (qkv_bias, output_bias) = one_window(hparams, dims), attention_biases(hparams)
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), dims.hidden[0], renormalise=False)
    if experts.num_active != NUM_ACTIVE:
        raise hparams.unsupported(
            f"num_experts_per_tok is {experts.num_active}; SparseMixer has two", "num_experts_per_tok"
        )
    experts = replace(experts, mixer_margin=2 * hparams.number("router_jitter", default=JITTER))
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, window=window, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    has_bias = (
        hparams.has_tensor("output.bias") if hparams.is_gguf else hparams.flag(None, "lm_head_bias", default=False)
    )
    return decoder(hparams, dims, blocks, norm, head=Head(tied=False, bias=has_bias))


def _rope(hparams: HParams, head_dim: int, context: int) -> Rope:
    """config.json has a magnitude of its own for texts within the original context, and one for longer ones."""
    rope, table = read_rope(hparams, "half", head_dim, context), rope_entries(hparams, "full_attention", context)
    if table is None or scaling_kind(hparams, table) == "none":
        return rope
    original = hparams.integer("rope_original_context", table=table)
    kind = "long" if (hparams.requested_context or 0) > original else "short"
    return replace(rope, magnitude=hparams.number(f"rope_{kind}_magnitude", table=table))
