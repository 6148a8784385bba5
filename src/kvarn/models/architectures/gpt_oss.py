"""gpt-oss: attention sinks, windows in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.recast_weights import FLOATS, Rearranged, RearrangedWeights
from kvarn.formats.tensor_view import WeightView, renamed
from kvarn.formats.weights import TensorInfo
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import decoder, every_nth_full, rms_norm, window_layers

PERIOD = 2
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # those of the activation swiglu_oai


def describe(hparams: HParams) -> ModelSpec:
    """Describe a gpt-oss. The softmax over the chosen experts is that over all of them, renormalised."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    windowed = window_layers(hparams, dims, every_nth_full(dims, PERIOD))
    for name, known in SWIGLU.items():
        if (given := hparams.number(name, default=known)) != known:
            raise hparams.unsupported(f"{name} is {given:g}; {known:g} is known", name)
    hidden, has_bias = hparams.integer("expert_hidden", default=dims.hidden[0]), True
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "attention_bias", default=True)
        hparams.activation("silu")  # of the gate, before it is clamped
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=True)
    experts = replace(experts, activation="swiglu_oai", router_bias=True, expert_bias=True)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope,
                window=window if windowed[layer] else None,
                qkv_bias=has_bias,
                output_bias=has_bias,
                sinks=True,
            ),
            feed_forward=experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def separate_experts(spec: ModelSpec, view: WeightView) -> WeightView:
    """Turn the experts of a folder round, unless they are MXFP4, and take gates and ups, every other row, apart."""
    if view.metadata.get("hf") is None:
        return view
    made: dict[str, Rearranged] = {}
    entries = dict(view.entries)
    for layer in range(len(spec.blocks)):
        stem = f"model.layers.{layer}.mlp.experts."
        for theirs, ours in (("gate_up_proj", {"gate": 0, "up": 1}), ("down_proj", {"down": None})):
            for ending, suffix in (("", "weight"), ("_bias", "bias")):
                entry = entries.pop(f"{stem}{theirs}{ending}", None)
                if entry is None:
                    continue
                for part, first in ours.items():
                    one = _rearranged(entry.info, f"blk.{layer}.ffn_{part}_exps.{suffix}", first)
                    made[one.info.name] = one
                    entries[one.info.name] = renamed(one.info, one.info.name)
    return WeightView(RearrangedWeights(view.source, made), entries)


def _rearranged(stored: TensorInfo, name: str, first: int | None) -> Rearranged:
    """first: 0 for the even rows, 1 for the odd ones, None for all."""
    if len(stored.shape) not in (2, 3):
        raise FormatError(f"tensor {stored.name} has shape {stored.shape}; expected (experts, in, out)")

    def order(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        turned = values.swapaxes(1, 2) if values.ndim == 3 and stored.type in FLOATS else values
        return turned if first is None else turned[:, first::2]

    shape = order(np.broadcast_to(np.int8(0), stored.shape)).shape
    return Rearranged(TensorInfo(name, stored.type, shape), stored.name, order)
