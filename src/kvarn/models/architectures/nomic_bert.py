"""Nomic BERT: a BERT with rope instead of learned positions. The first has gated feed-forwards and no biases; the
second has plain ones with biases, and experts in every second layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.recast_weights import FLOATS, Rearranged, RearrangedWeights
from kvarn.formats.tensor_view import WeightView, renamed
from kvarn.formats.weights import TensorInfo
from kvarn.models.architectures.bert import encoder, input_embedding, refuse_causal
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Activation, Block, FeedForward, MixtureOfExperts, ModelSpec, Norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Nomic BERT."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    refuse_causal(hparams)
    if hparams.has_tensor("cls.output.weight"):
        raise hparams.unsupported("a classifier of this kind of model is unknown", "classifier")
    # Beyond what it was trained with, its authors' code scales the rope anew for each text: no model is run there.
    context = min(dims.context_length, hparams.integer("trained_positions", default=dims.context_length))
    rope = read_rope(hparams, "half", dims.head_dim, context)
    has_bias = _has_bias(hparams, "qkv_proj_bias", "attn_output")
    period = hparams.integer("expert_period", default=0)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, mask="bidirectional", qkv_bias=has_bias, output_bias=has_bias),
            feed_forward=_experts(hparams, layer, hidden)
            if period and layer % period == 1
            else _feed_forward(hparams, hidden),
            norm=norm,
            placement="residual",
        )
        for layer, hidden in enumerate(dims.hidden)
    )
    pooled = read_encoder(hparams, "mean")
    assert pooled is not None, "there is a default"
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=context,
        embedding=input_embedding(hparams, None, norm),
        blocks=blocks,
        output_norm=None,
        generation=pooled,
    )


def stack_experts(spec: ModelSpec, view: WeightView) -> WeightView:
    """Its authors' folders have the rows of all experts in one matrix, those of the second turned round."""
    entries, made = dict(view.entries), {}
    for layer, block in enumerate(spec.blocks):
        moe = block.feed_forward
        if not isinstance(moe, MixtureOfExperts):
            continue
        for part in ("up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            entry = entries.get(name)
            if entry is None or len(entry.info.shape) != 2:
                continue
            shape = (moe.num_experts, moe.hidden, spec.width)
            if entry.info.shape != (shape[0] * shape[1], shape[2]) or entry.info.type not in FLOATS:
                raise FormatError(f"tensor {name} has shape {entry.info.shape}; expected the rows of {shape}")
            if part == "up":
                entries[name] = replace(entry, info=replace(entry.info, shape=shape))
                continue
            made[name] = _turned(entry.info, entry.parts[0].tensor, shape)
            entries[name] = renamed(made[name].info, name)
    return WeightView(RearrangedWeights(view.source, made), entries)


def _turned(info: TensorInfo, origin: str, shape: tuple[int, int, int]) -> Rearranged:
    def order(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return values.reshape(shape).swapaxes(1, 2)

    return Rearranged(replace(info, shape=(shape[0], shape[2], shape[1])), origin, order)


def _feed_forward(hparams: HParams, hidden: int) -> FeedForward:
    has_bias = _has_bias(hparams, "mlp_fc1_bias", "ffn_up")
    if has_bias != _has_bias(hparams, "mlp_fc2_bias", "ffn_down"):
        raise hparams.unsupported("a bias of one matrix of a feed-forward alone is unknown", "mlp_fc1_bias")
    is_gated = hparams.has_tensor("blk.0.ffn_gate.weight")
    return FeedForward(hidden, _activation(hparams, is_gated=is_gated), gated=is_gated, bias=has_bias)


def _experts(hparams: HParams, layer: int, hidden: int) -> MixtureOfExperts:
    usual = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=False)
    return replace(
        usual,
        activation=_activation(hparams, is_gated=False),
        gated=False,
        output_bias=hparams.has_tensor(f"blk.{layer}.ffn_exps.bias"),  # llama.cpp's converter leaves it out
    )


def _has_bias(hparams: HParams, key: str, tensor: str) -> bool:
    """GGUF says it by its tensors."""
    return hparams.has_tensor(f"blk.0.{tensor}.bias") if hparams.is_gguf else hparams.flag(None, key, default=False)


def _activation(hparams: HParams, *, is_gated: bool) -> Activation:
    """Its authors have a key of their own for it, and say swiglu for what transformers calls silu."""
    name = hparams.raw(None, "activation_function")
    if name is None:
        return hparams.activation("silu" if is_gated else "gelu")
    known: dict[object, Activation] = {"swiglu": "silu"} if is_gated else {"gelu": "gelu"}
    if name not in known:
        raise hparams.unsupported(f"activation_function is {name!r:.40} (gated: {is_gated})", "activation_function")
    return known[name]
