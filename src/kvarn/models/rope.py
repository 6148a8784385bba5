"""Rotary frequencies: every scaling method is folded into the inverse frequencies here and nowhere else.

linear    positions divided by a factor                        (kaiokendev 2023)
llama3    low frequencies divided, high ones kept, a ramp between
yarn      as llama3 with a ramp over dimensions and a magnitude  (arXiv:2309.00071)
longrope  each frequency divided by its own factor, short or long by the context (arXiv:2402.13753)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvarn.models.hparams import HParams
from kvarn.models.spec import Rope

Float64 = npt.NDArray[np.float64]


def read_rope(
    hparams: HParams, style: Literal["interleaved", "half"], head_dim: int, context: int, kind: str = "full_attention"
) -> Rope:
    """Build the rope of one kind of layer from the model's hyperparameters. context is the model's own."""
    table = _parameters(hparams, kind)
    dims = _rotated_dims(hparams, head_dim, table)
    base = hparams.number("rope_base", default=10000.0, table=table)
    plain = frequencies(base, dims)
    scaling = _scaling_kind(hparams, table)
    if scaling == "none":
        factors = hparams.vector("rope_freqs.weight", dims // 2) if hparams.is_gguf else None
        return rope(style, plain if factors is None else plain / factors)
    if scaling == "longrope":
        return rope(style, *_longrope(hparams, table, plain, context))
    factor = hparams.number("rope_factor", table=table)
    if scaling == "linear":
        return rope(style, plain / factor)
    if scaling == "llama3":
        return rope(style, _llama3(hparams, table, plain, factor))
    return rope(style, *_yarn(hparams, table, plain, base, factor))


def frequencies(base: float, dims: int) -> Float64:
    """Return base ** (-2i / dims) for i < dims / 2."""
    return np.power(base, -np.arange(0, dims, 2, dtype=np.float64) / dims)


def rope(style: Literal["interleaved", "half"], inverse: Float64, magnitude: float = 1.0) -> Rope:
    return Rope(style=style, inverse_frequencies=tuple(float(f) for f in inverse), magnitude=magnitude)


def _parameters(hparams: HParams, kind: str) -> Mapping[str, Any] | None:
    """Gather config.json's rope entries, old spelling or new, flat or by kind of layer. None for GGUF."""
    if hparams.is_gguf:
        return None
    base = hparams.raw(None, "rope_theta")
    old: dict[str, Any] = {} if base is None else {"rope_theta": base}
    given = hparams.raw(None, "rope_parameters", "rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise hparams.format_error(f"rope_parameters is {given!r}; expected an object")
    nested = given.get(kind)
    given = nested if isinstance(nested, Mapping) else given
    shared = {key: hparams.raw(None, key) for key in ("original_max_position_embeddings", "partial_rotary_factor")}
    return {key: value for key, value in (shared | old | dict(given)).items() if value is not None}


def _rotated_dims(hparams: HParams, head_dim: int, table: Mapping[str, Any] | None) -> int:
    share = hparams.number("partial_rotary_factor", default=1.0, table=table)
    dims: int = hparams.integer("rope_dims", default=int(head_dim * share), table=table)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise hparams.format_error(f"rope rotates {dims} of {head_dim} dimensions; expected an even number of them")
    return dims


def _scaling_kind(hparams: HParams, table: Mapping[str, Any] | None) -> str:
    if table is None:
        if hparams.has_tensor("rope_factors_long.weight") or hparams.has_tensor("rope_factors_short.weight"):
            hparams.raw("rope.scaling.type")
            return "longrope"
        name = hparams.raw("rope.scaling.type")
        factor = hparams.number("rope_factor", default=None)
        hparams.raw("rope.scaling.original_context_length")  # has no effect unless the kind of scaling uses it
        if name is None and factor is not None:
            name = "linear"  # the meaning of a factor without a type
        known: tuple[str, ...] = ("none", "linear", "yarn")
    else:
        name = table.get("rope_type", table.get("type"))
        name = {"default": "none", "su": "longrope"}.get(name, name) if isinstance(name, str) else name
        known = ("none", "linear", "llama3", "yarn", "longrope")
    if name is None:
        return "none"
    if name not in known or (table or {}).keys() & {"mscale", "mscale_all_dim"}:
        raise hparams.unsupported(
            f"rope scaling {name!r} is unknown; known are {', '.join(known)}", "rope.scaling.type"
        )
    return str(name)


def _llama3(hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, factor: float) -> Float64:
    low = hparams.number("rope_low_frequency", table=table)
    high = hparams.number("rope_high_frequency", table=table)
    original = hparams.integer("rope_original_context", table=table)
    if high <= low:
        raise hparams.format_error(f"low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
    turns = original * plain / (2 * math.pi)  # over the context the model was first trained with
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    inverse: Float64 = plain * (keep + (1.0 - keep) / factor)
    return inverse


def _yarn(
    hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, base: float, factor: float
) -> tuple[Float64, float]:
    original = hparams.integer("rope_original_context", table=table)
    fast = hparams.number("rope_beta_fast", default=32.0, table=table)
    slow = hparams.number("rope_beta_slow", default=1.0, table=table)
    dims = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(dimension(fast)), 0)
    last = min(math.ceil(dimension(slow)), dims - 1)
    divide = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    inverse = plain * (1.0 - divide) + plain / factor * divide
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    given = hparams.number("rope_magnitude", default=None, table=table)
    if given is None:
        return inverse, usual
    return inverse, given * usual if hparams.is_gguf else given  # GGUF's is a factor on top, config.json's replaces it


def _longrope(hparams: HParams, table: Mapping[str, Any] | None, plain: Float64, context: int) -> tuple[Float64, float]:
    original: int = hparams.integer("rope_original_context", default=context, table=table)
    length = "long" if (hparams.requested_context or context) > original else "short"
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
    return plain / factors, hparams.number("rope_magnitude", default=usual, table=table)
