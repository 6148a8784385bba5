"""The parts of a ModelSpec that several architectures build alike from their hyperparameters and dimensions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvarn.checks import short
from kvarn.models.dimensions import Dimensions
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparams import HParams
from kvarn.models.rope import usual_context
from kvarn.models.spec import Autoregressive, Block, Head, InputEmbedding, ModelSpec, Norm


def rms_norm(hparams: HParams) -> Norm:
    return Norm("rms", hparams.number("rms_norm_eps"))


def layer_norm(hparams: HParams, *, has_bias: bool) -> Norm:
    return Norm("layer", hparams.number("layer_norm_eps"), has_bias=has_bias)


def attention_biases(hparams: HParams, layer: int = 0) -> tuple[bool, bool]:
    """Return whether Q, K and V, and whether the output have biases: config.json says it for all, GGUF by the tensors
    of the first layer that has attention."""
    if hparams.is_gguf:
        return hparams.has_tensor(f"blk.{layer}.attn_q.bias"), hparams.has_tensor(f"blk.{layer}.attn_output.bias")
    has_bias = hparams.flag(None, "attention_bias", default=False)
    return has_bias, has_bias


def ffn_bias(hparams: HParams) -> bool:
    """Return whether the matrices of a feed-forward have biases: config.json says it, GGUF by its tensors."""
    if hparams.is_gguf:
        return hparams.has_some("ffn_down.bias")
    return hparams.flag(None, "mlp_bias", default=False)


def one_window(hparams: HParams, dims: Dimensions) -> int | None:
    """Read the window that all layers of a model have; layer_types may say the same, and nothing else."""
    window: int | None = hparams.integer("sliding_window", default=0) or None
    usual = (window is not None,) * dims.num_layers
    if window_layers(hparams, dims, usual) != usual:
        kind = "full_attention" if window is None else "sliding_attention"
        raise hparams.unsupported(
            f"layer_types differ from layer to layer; {hparams.architecture} has {kind} in all of them", "layer_types"
        )
    return window


def window_layers(hparams: HParams, dims: Dimensions, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which layers attend through a window: as the file says by layer, else the architecture's usual ones."""
    if hparams.is_gguf:
        return _gguf_window_layers(hparams, dims, usual)
    kinds = hparams.raw(None, "layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list | tuple) or len(kinds) != dims.num_layers:
        raise hparams.format_error(f"layer_types must have one entry for each of the {dims.num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise hparams.unsupported(
                f"layer_types has {short(kind)}; known are full_attention, sliding_attention", "layer_types"
            )
    if "sliding_attention" in kinds and not hparams.integer("sliding_window", default=0):
        raise hparams.unsupported("layer_types names windows, but sliding_window has no size", "layer_types")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _gguf_window_layers(hparams: HParams, dims: Dimensions, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """A list has an entry for each layer; a number n makes every n-th layer a full one, 0 none of them windowed."""
    pattern = hparams.raw("attention.sliding_window_pattern")
    if pattern is None:
        return usual
    if isinstance(pattern, Sequence | np.ndarray) and not isinstance(pattern, str):
        if len(pattern) != dims.num_layers:
            raise hparams.format_error(
                f"sliding_window_pattern has {len(pattern)} entries for {dims.num_layers} layers"
            )
        return tuple(bool(one) for one in pattern)
    period = hparams.integer("window_pattern")
    return tuple(period > 0 and (layer + 1) % period != 0 for layer in range(dims.num_layers))


def layer_kinds(
    hparams: HParams, dims: Dimensions, usual: tuple[bool, ...], kind: str, gguf: str | None
) -> tuple[bool, ...]:
    """Return which layers are of a kind beside full_attention: as the file says by layer, else the usual ones."""
    given, key = hparams.raw(gguf, "layer_types"), gguf if hparams.is_gguf else "layer_types"
    if given is None:
        return usual
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) < dims.num_layers:
        raise hparams.format_error(f"{key} must have one entry for each of the {dims.num_layers} layers")
    if hparams.is_gguf:
        for one in given:
            if not isinstance(one, bool | np.bool_ | int | np.integer) or one not in (0, 1):
                raise hparams.format_error(f"{key} has {short(one)}; expected true or false for each layer")
        return tuple(bool(one) for one in given[: dims.num_layers])
    for one in given:
        if one not in ("full_attention", kind):
            raise hparams.unsupported(f"layer_types has {one!r:.60}; known are full_attention, {kind}", "layer_types")
    if len(given) != dims.num_layers:
        raise hparams.format_error(f"layer_types has {len(given)} entries for {dims.num_layers} layers")
    return tuple(one == kind for one in given)


def every_nth_full(dims: Dimensions, period: int) -> tuple[bool, ...]:
    """Windows in all layers but every n-th."""
    return tuple((layer + 1) % period != 0 for layer in range(dims.num_layers))


def decoder(
    hparams: HParams,
    dims: Dimensions,
    blocks: tuple[Block, ...],
    norm: Norm,
    *,
    embedding: InputEmbedding | None = None,
    head: Head | None = None,
) -> ModelSpec:
    """Put a causal language model together; one made for embeddings says so by its pooling.

    head: what the head has beside its matrix; whether that is tied is read here.
    """
    if not hparams.flag(None, "is_causal", default=True):
        raise hparams.unsupported("is_causal is false: every token sees those after it", "is_causal")
    pooled = read_encoder(hparams, default=None)
    tied = hparams.ties_head()
    if not tied and not pooled and not hparams.has_tensor("output.weight"):
        raise hparams.format_error(
            "the output matrix (lm_head.weight) is missing, and tie_word_embeddings is false or not given; "
            "download all files of the model, or set tie_word_embeddings to true if the embedding stands in for it"
        )
    return ModelSpec(
        architecture=hparams.architecture,
        name=model_name(hparams),
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=usual_context(hparams, dims.context_length),
        embedding=embedding or InputEmbedding(),
        blocks=blocks,
        output_norm=norm,
        head=None if pooled else replace(head or Head(tied), tied=tied),
        generation=pooled or Autoregressive(),
    )


def model_name(hparams: HParams) -> str:
    """Return the name to show: the file's own, else the architecture."""
    metadata = hparams.weights.metadata
    name = metadata.get("general.name") if hparams.is_gguf else metadata["hf"].get("_name_or_path")
    if isinstance(name, str) and name:
        return name
    # A reranker that is a language model is known by its name alone.
    parts = str(metadata.get("hf_folder", "")).replace(os.sep, "/").split("/")
    named = [part for part in parts if "reranker" in part.lower()]
    return named[-1][:80] if named else hparams.architecture
