"""Rotary frequencies: every scaling method is folded into the inverse frequencies here and nowhere else.

dynamic   nothing up to the model's context, and no model is run beyond it
linear    positions divided by a factor                        (kaiokendev 2023)
llama3    low frequencies divided, high ones kept, a ramp between
yarn      as llama3 with a ramp over dimensions and a magnitude  (arXiv:2309.00071)
longrope  each frequency divided by its own factor, short or long by the context (arXiv:2402.13753)
ntk_alpha a larger base, whatever the context; config.json calls it dynamic
proportional  the frequencies of all dimensions, and 0 for all but a part of them
mrope     of texts the same as none: a token has one position, not one for each axis of an image
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.models.config.rope_entries import rope_entries, scaling_kind
from kvarn.models.hparams import HParams
from kvarn.models.spec import Rope

Float64 = npt.NDArray[np.float64]


def read_rope(
    hparams: HParams, style: Literal["interleaved", "half"], head_dim: int, context: int, kind: str = "full_attention"
) -> Rope:
    """Build the rope of one kind of layer from the model's hyperparameters. context is the model's own."""
    table = rope_entries(hparams, kind, context)
    base = hparams.number("rope_base", default=10000.0, table=table)
    scaling = scaling_kind(hparams, table)
    if scaling == "proportional":
        return rope(style, _proportional(hparams, table, frequencies(base, head_dim)))
    dims = _rotated_dims(hparams, head_dim, table)
    if scaling == "ntk_alpha":
        stretched = base * hparams.number("rope_alpha", table=table) ** (dims / (dims - 2))
        return rope(style, frequencies(stretched, dims))
    plain = frequencies(base, dims)
    if scaling == "longrope":
        return rope(style, *_longrope(hparams, table, plain, context))
    factors = hparams.vector("rope_freqs.weight", dims // 2) if hparams.is_gguf else None
    plain = plain if factors is None else plain / factors
    if scaling in ("none", "dynamic"):
        return rope(style, plain, gguf_magnitude(hparams))
    factor = hparams.number("rope_factor", table=table)
    if scaling == "linear":
        return rope(style, plain / factor, gguf_magnitude(hparams))
    if scaling == "llama3":
        return rope(style, _llama3(hparams, table, plain, factor))
    return rope(style, *_yarn(hparams, table, plain, base, factor))


def unscaled_rope(hparams: HParams, style: Literal["interleaved", "half"], head_dim: int, context: int) -> Rope:
    """Build the rope of windowed layers, which no scaling stretches: with a base of its own, or the model's."""
    by_kind = hparams.raw(None, "rope_parameters")
    if isinstance(by_kind, Mapping) and "sliding_attention" in by_kind:
        return read_rope(hparams, style, head_dim, context, kind="sliding_attention")
    table = rope_entries(hparams, "full_attention", context)
    base = hparams.number("rope_base", default=10000.0, table=table)
    return rope(style, frequencies(hparams.number("rope_base_local", default=base), head_dim), gguf_magnitude(hparams))


def frequencies(base: float, dims: int) -> Float64:
    """Return base ** (-2i / dims) for i < dims / 2."""
    return np.power(base, -np.arange(0, dims, 2, dtype=np.float64) / dims)


def rope(style: Literal["interleaved", "half"], inverse: Float64, magnitude: float = 1.0) -> Rope:
    return Rope(style=style, inverse_frequencies=tuple(float(f) for f in inverse), magnitude=magnitude)


def gguf_magnitude(hparams: HParams) -> float:
    """GGUF's rope.scaling.attn_factor, by which llama.cpp multiplies whatever the kind of scaling; 1 without it."""
    magnitude: float = hparams.number("rope_magnitude", default=1.0) if hparams.is_gguf else 1.0
    return magnitude


def usual_context(hparams: HParams, context: int) -> int:
    """Return the context a model is run with where none is asked for: LongRoPE's original one, else the model's own.

    Transformers chooses LongRoPE's factors anew for each prompt: the short ones up to the original context. Here one
    choice holds for all requests, and without a larger context it is the one transformers makes.
    """
    table = rope_entries(hparams, "full_attention", context)
    if scaling_kind(hparams, table) != "longrope":
        return context
    original = _original_context(hparams, table, context)
    if (hparams.requested_context or 0) <= original:
        return min(context, original)
    return context


def _rotated_dims(hparams: HParams, head_dim: int, table: Mapping[str, Any] | None) -> int:
    rotary_dim = hparams.integer("rotary_dim", default=head_dim)
    share = hparams.number("partial_rotary_factor", default=rotary_dim / head_dim, table=table)
    if share != 1.0 and not (hparams.has_key("partial_rotary_factor") or hparams.has_key("rotary_pct")):
        raise hparams.unsupported(
            f"partial_rotary_factor is {share:g}; {hparams.architecture} rotates all dimensions",
            "partial_rotary_factor",
        )
    dims: int = hparams.integer("rope_dims", default=int(head_dim * share), table=table)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise hparams.format_error(f"rope rotates {dims} of {head_dim} dimensions; expected an even number of them")
    return dims


def _original_context(hparams: HParams, table: Mapping[str, Any] | None, context: int) -> int:
    original: int = hparams.integer("rope_original_context", default=context, table=table)
    return original


def _proportional(hparams: HParams, table: Mapping[str, Any] | None, plain: Float64) -> Float64:
    """The first share of the frequencies; dimensions without one stay as they are."""
    share = hparams.number("partial_rotary_factor", default=1.0, table=table)
    is_rotated = np.arange(len(plain)) < int(share * len(plain))
    return np.where(is_rotated, plain / hparams.number("rope_factor", default=1.0, table=table), 0.0)


def _llama3(hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, factor: float) -> Float64:
    low = hparams.number("rope_low_frequency", table=table)
    high = hparams.number("rope_high_frequency", table=table)
    original = hparams.integer("rope_original_context", table=table)
    if high < low:
        raise hparams.format_error(f"low_freq_factor {low:g} must be at most high_freq_factor {high:g}")
    turns = original * plain / (2 * math.pi)  # over the context the model was first trained with
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns > low).astype(np.float64)
    inverse: Float64 = plain * (keep + (1.0 - keep) / factor)
    return inverse


def _yarn(
    hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, base: float, factor: float
) -> tuple[Float64, float]:
    divide = _yarn_ramp(hparams, table, 2 * len(plain), base)
    inverse = plain * (1.0 - divide) + plain / factor * divide
    usual = _yarn_magnitude(hparams, table, factor)
    if hparams.is_gguf:
        return inverse, usual * gguf_magnitude(hparams)
    return inverse, hparams.number("rope_magnitude", default=usual, table=table)  # attention_factor replaces it


def _yarn_ramp(hparams: HParams, table: Mapping[str, Any] | None, dims: int, base: float) -> Float64:
    """Return the share of each frequency that is divided: none of the fast ones, all of the slow ones."""
    original = hparams.integer("rope_original_context", table=table)
    fast = hparams.number("rope_beta_fast", default=32.0, table=table)
    slow = hparams.number("rope_beta_slow", default=1.0, table=table)

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(fast), dimension(slow)
    if _truncates(hparams, table):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    # Where the ramp is empty or turned round, GGUF's meaning is llama.cpp's, config.json's is transformers'.
    width = max(last - first, 0.001) if hparams.is_gguf else (last - first) or 0.001
    ramp: Float64 = np.clip((np.arange(dims // 2) - first) / width, 0.0, 1.0)
    return ramp


def _truncates(hparams: HParams, table: Mapping[str, Any] | None) -> bool:
    if table is None:
        return hparams.architecture != "gpt-oss"  # GGUF has no key for it
    value = table.get("truncate", True)
    if not isinstance(value, bool):
        raise hparams.format_error(f"truncate is {short(value)}; expected true or false")
    return value


def _yarn_magnitude(hparams: HParams, table: Mapping[str, Any] | None, factor: float) -> float:
    """Return 0.1 ln(factor) + 1; with mscale and mscale_all_dim, a quotient of two of them."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if hparams.is_gguf and (weight := hparams.number("rope_log_multiplier", default=0.0)):
        return magnitude(1.0) / magnitude(weight)
    above, below = (hparams.number(name, default=0.0, table=table) for name in ("rope_mscale", "rope_mscale_all_dim"))
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)


def _longrope(hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, context: int) -> tuple[Float64, float]:
    original = _original_context(hparams, table, context)
    length = "long" if (hparams.requested_context or 0) > original else "short"
    _note_longrope(hparams, length, original, context)
    if table is None:
        name = f"rope_factors_{length}.weight"
        factors = hparams.vector(name, len(plain))
    else:
        name = f"{length}_factor"
        factors = hparams.positive_vector(name, table[name], len(plain)) if name in table else None
    if factors is None:
        raise hparams.format_error(f"{name} is missing; the file may be incomplete")
    extended = hparams.number("rope_factor", default=context / original, table=table)
    usual = math.sqrt(1 + math.log(extended) / math.log(original)) if extended > 1.0 and original > 1 else 1.0
    if hparams.is_gguf:
        return plain / factors, gguf_magnitude(hparams)
    return plain / factors, hparams.number("rope_magnitude", default=usual, table=table)


def _note_longrope(hparams: HParams, length: str, original: int, context: int) -> None:
    if length == "long":
        note = f"LongRoPE's long factors for every text; up to {original:,} tokens the short ones are more exact"
        hparams.notes[f"{note}: leave the context out, or give at most {original}"] = None
    elif context > original:
        note = f"LongRoPE's short factors, for texts of up to {original:,} tokens"
        hparams.notes[f"{note}; a larger context, up to {context}, takes the long factors for every text"] = None
