"""Falcon-H1: attention and a state space side by side in every layer. Its many multipliers are folded into the weights,
as GGUF files have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.tensor_view import WeightView, changed
from kvarn.models.architectures.mamba2 import flatten_states, read_mamba2
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams, text_config
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, Head, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, decoder, rms_norm
from kvarn.models.state_layers import Mamba2

NUMBERS = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}  # gate and down; z, v, B, C and dt


def describe(hparams: HParams) -> ModelSpec:
    """Describe a Falcon-H1."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    mlp_bias = hparams.flag(None, "mlp_bias", default=False)
    has_norm = hparams.has_tensor("blk.0.ssm_norm.weight")
    is_first = hparams.flag(None, "mamba_norm_before_gate", default=True) and not hparams.is_gguf
    if not hparams.is_gguf:
        has_norm = hparams.flag(None, "mamba_rms_norm", default=False)
        _check_multipliers(hparams)
    state = replace(read_mamba2(hparams, dims.width), norm=norm if has_norm else None, norm_first=is_first)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"), bias=mlp_bias),
            norm=norm,
            state=state,
        )
        for layer in range(dims.num_layers)
    )
    embedding = InputEmbedding(scale=hparams.number("embedding_scale", default=1.0))
    head = Head(tied=False, scale=hparams.number("head_scale", default=1.0))
    return decoder(hparams, dims, blocks, norm, embedding=embedding, head=head)


def _check_multipliers(hparams: HParams) -> None:
    for name in NUMBERS:
        hparams.number(f"{name}_multiplier", default=1.0)
    for name, count in LISTS.items():
        given = hparams.raw(None, name)
        is_list = isinstance(given, list | tuple) and len(given) == count
        if given is not None and not (is_list and all(_is_number(one) for one in given)):
            raise hparams.format_error(f"{name} is {given!r:.60}; expected {count} numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def fold(spec: ModelSpec, view: WeightView) -> WeightView:
    """Multiply the weights of a folder by what their products are multiplied with; GGUF files have it done."""
    view = flatten_states(spec, view)
    hf, entries = view.metadata.get("hf"), dict(view.entries)
    if hf is None:
        for stem in (f"blk.{layer}.ffn_norm" for layer in range(len(spec.blocks))):  # is written without an ending
            if entry := entries.pop(stem, None):
                entries[f"{stem}.weight"] = replace(entry, info=replace(entry.info, name=f"{stem}.weight"))
        return WeightView(view.source, entries)
    for layer, block in enumerate(spec.blocks):
        assert block.state is not None, "every layer has a state"
        for name, factor in _factors(text_config(hf), block.state):
            key = f"blk.{layer}.{name}"
            if key in entries and np.any(factor != 1):
                entries[key] = changed(entries[key], _product(factor))
    return WeightView(view.source, entries)


def _product(factor: npt.NDArray[np.float32]) -> Any:
    """One factor, or one for each row."""
    return lambda values: (values.T * factor).T


def _factors(config: Any, state: Mamba2) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    single = {name: _given(config, f"{name}_multiplier", 1.0) for name in NUMBERS}
    gate, down = _given(config, "mlp_multipliers", (1.0, 1.0))
    keys = state.num_groups * state.state_dim
    sizes = (state.values, state.values, keys, keys, state.num_heads)
    rows = np.repeat(_given(config, "ssm_multipliers", (1.0,) * 5), sizes).astype(np.float32)
    outer, inner = single["attention_out"], single["attention_in"]
    pairs = {  # of the weight, of the bias
        "attn_q": (inner, 1.0),
        "attn_k": (inner * single["key"], single["key"]),
        "attn_v": (inner, 1.0),
        "attn_output": (outer, outer),
        "ssm_in": (rows * np.float32(single["ssm_in"]), rows),
        "ssm_out": (single["ssm_out"], single["ssm_out"]),
        "ffn_gate": (gate, gate),
        "ffn_down": (down, down),
    }
    for name, (weight, bias) in pairs.items():
        yield f"{name}.weight", np.asarray(weight, np.float32)
        yield f"{name}.bias", np.asarray(bias, np.float32)


def _given(config: Any, key: str, default: Any) -> Any:
    return default if config.get(key) is None else config[key]
