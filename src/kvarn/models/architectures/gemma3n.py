"""Gemma 3n: four residual streams of which a layer computes one, low-rank maps beside attention, an input for every
layer, gates of which few values pass, and last layers on the keys of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from kvarn.checks import short
from kvarn.errors import FormatError
from kvarn.formats.tensor_view import WeightView, stacked
from kvarn.models.architectures.gemma3 import local_rope
from kvarn.models.architectures.gemma4 import drop_shared_keys, kv_sources, read_per_layer
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.residual import AltUp, PerLayerInput
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, every_nth_full, rms_norm, window_layers

PERIOD = 5  # every fifth layer is global
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models with more layers than these, where config.json does not say it


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Gemma 3n (its text part)."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    ropes = {False: read_rope(hparams, "half", dims.head_dim, dims.context_length), True: local_rope(hparams, dims)}
    windowed = window_layers(hparams, dims, every_nth_full(dims, PERIOD))
    window, (qkv_bias, output_bias) = hparams.integer("sliding_window") or None, attention_biases(hparams)
    per_layer, activation = read_per_layer(hparams, dims, norm), hparams.activation("gelu_tanh")
    if per_layer is None:
        raise hparams.unsupported("the layers have no inputs of their own", "hidden_size_per_layer_input")
    cutoffs, sources, rank = _cutoffs(hparams, dims), kv_sources(hparams, windowed), _laurel_rank(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                ropes[windowed[layer]],
                scale=1.0,
                window=window if windowed[layer] else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=norm,
                value_norm_eps=norm.eps,
                kv_source=sources[layer],
            ),
            feed_forward=FeedForward(dims.hidden[layer], activation, gate_cutoff=cutoffs[layer]),
            norm=norm,
            placement="sandwich",
            per_layer=PerLayerInput(per_layer.length, activation),
            laurel=rank,
        )
        for layer in range(dims.num_layers)
    )
    cap = hparams.number("final_softcap", default=30.0 if hparams.is_gguf else 0.0) or None
    embedding = InputEmbedding(scale=math.sqrt(dims.width), per_layer=per_layer)
    spec = decoder(hparams, dims, blocks, norm, embedding=embedding, head=Head(tied=True, softcap=cap))
    return replace(spec, altup=_altup(hparams, spec))


def _altup(hparams: HParams, spec: ModelSpec) -> AltUp:
    streams, active = hparams.integer("num_streams", default=4), hparams.integer("active_stream", default=0)
    if active >= streams:
        raise hparams.format_error(f"the active stream is {active}; there are {streams}")
    hparams.raw(None, "altup_coef_clip")  # of training
    is_scaled = hparams.flag(None, "altup_correct_scale", default=True)
    return AltUp(streams, active, spec.blocks[0].norm, correct_scale=is_scaled)


def _laurel_rank(hparams: HParams) -> int:
    """GGUF says it by the tensor alone."""
    tensor = hparams.weights.tensors.get("blk.0.laurel_l.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise hparams.format_error("tensor blk.0.laurel_l.weight is missing or no matrix; the file may be incomplete")
    return int(hparams.integer("laurel_rank", default=tensor.shape[0]))


def _cutoffs(hparams: HParams, dims: Dimensions) -> tuple[float | None, ...]:
    """How many standard deviations above the mean a gate's values must be; GGUF has these, config.json the share."""
    given = hparams.raw("activation_sparsity_scale", "activation_sparsity_pattern")
    if given is None:
        sparse = SPARSE_LAYERS if dims.num_layers > SPARSE_LAYERS and not hparams.is_gguf else 0
        given = [SPARSITY] * sparse + [0.0] * (dims.num_layers - sparse)
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) != dims.num_layers:
        raise hparams.format_error(f"the sparsity of activations is {short(given)}; expected a number for each layer")
    if not all(
        isinstance(one, int | float | np.floating) and one < (np.inf if hparams.is_gguf else 1) for one in given
    ):
        raise hparams.format_error(f"the sparsity of activations is {short(given)}; expected numbers below 1")
    if hparams.is_gguf:
        return tuple(float(one) if one > -np.inf else None for one in given)
    return tuple(NormalDist().inv_cdf(one) if one > 0 else None for one in given)


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Drop the keys of layers that share those of others; stack the matrices of the streams."""
    entries = dict(view.entries)
    drop_shared_keys(spec, entries)
    assert spec.altup is not None, "every Gemma 3n has streams"
    if not spec.altup.correct_scale:
        for layer in range(len(spec.blocks)):
            entries.pop(f"blk.{layer}.altup_correct_scale.weight", None)
    for name in ("altup_proj", "altup_unembd_proj"):
        members = [entries.pop(f"{name}.{i}.weight", None) for i in range(spec.altup.streams - 1)]
        found = [member for member in members if member is not None]
        if found and len(found) < len(members):
            raise FormatError(f"{name} lacks a matrix; the download may be incomplete", file=view.path)
        if found:
            entries[f"{name}.weight"] = stacked(f"{name}.weight", found)
    return WeightView(view.source, entries)
