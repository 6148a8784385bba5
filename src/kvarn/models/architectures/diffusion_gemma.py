"""DiffusionGemma: a Gemma 4 with experts that reads text causally and denoises canvases of random tokens behind it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvarn.checks import short
from kvarn.formats.strict_json import read_optional
from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures import gemma4
from kvarn.models.diffusion.uniform import EntropyBound, UniformDiffusion
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, ModelSpec
from kvarn.models.spec_builder import rms_norm

CANVAS = 256  # where a file does not say
MAX_CANVAS = 4096
MAX_STEPS = 4096
# Field of EntropyBound: its key in generation_config.json and, after `diffusion.eb_`, in GGUF, and its bounds.
SCHEDULE: Mapping[str, tuple[str, str, float, float]] = {
    "max_steps": ("max_denoising_steps", "max_steps", 1, MAX_STEPS),
    "min_temperature": ("t_min", "t_min", 0, 100),
    "max_temperature": ("t_max", "t_max", 1e-3, 100),
    "bound": ("entropy_bound", "entropy_bound", 1e-9, 1e6),
    "confidence": ("confidence_threshold", "confidence_threshold", 1e-9, 100),
    "stability": ("stability_threshold", "stability_threshold", 0, MAX_STEPS),
}


def describe(hparams: HParams) -> ModelSpec:
    """Describe a DiffusionGemma (its text part)."""
    hparams.raw("attention.causal")  # of canvases; text is causal whatever it says
    spec = gemma4.describe_stack(hparams, has_experts=True, ties_values=True)
    if spec.head is None or not spec.head.tied:
        raise hparams.unsupported("tie_word_embeddings is false: text and canvases have weights of their own", "tie")
    if any(block.attention.kv_source is not None for block in spec.blocks) or spec.embedding.per_layer is not None:
        raise hparams.unsupported(
            "a canvas over shared keys or inputs of layers is not known here", "num_shared_kv_layers"
        )
    _refuse_other_keys(hparams)
    dense = spec.blocks[0].feed_forward
    canvas = _whole(hparams, *_canvas_length(hparams), 1, MAX_CANVAS, default=CANVAS)
    generation = UniformDiffusion(
        canvas, dense.hidden, hparams.activation("gelu_tanh"), rms_norm(hparams), _schedule(hparams)
    )
    return replace(spec, blocks=tuple(map(_two_way, spec.blocks)), generation=generation)


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """As of a Gemma 4 whose global layers have keys as values."""
    return gemma4.separate_stack(spec, view, is_tied=True)


def _two_way(block: Block) -> Block:
    return replace(block, mixer=replace(block.attention, mask="canvas"), output_scale=True, text_scale=True)


def _refuse_other_keys(hparams: HParams) -> None:
    """GGUF's `diffusion.` keys are of no architecture: those of other canvases are refused where they are on."""
    known = {"diffusion.canvas_length", *(f"diffusion.eb_{gguf}" for _, gguf, *_ in SCHEDULE.values())}
    for key, value in hparams.weights.metadata.items():
        if key.startswith("diffusion.") and key not in known and value:
            raise hparams.unsupported(f"{key} is {short(value)}, which these canvases do not have", key)


def _canvas_length(hparams: HParams) -> tuple[str, Any]:
    """The key and its value; it belongs to the whole model, not to its text part."""
    if hparams.is_gguf:
        return "diffusion.canvas_length", hparams.weights.metadata.get("diffusion.canvas_length")
    return "canvas_length", hparams.weights.metadata["hf"].get("canvas_length")


def _schedule(hparams: HParams) -> EntropyBound:
    folder = hparams.weights.metadata.get("hf_folder")
    config = {} if folder is None else dict(read_optional(os.path.join(folder, "generation_config.json")))
    sampler = config.get("sampler_config")
    if isinstance(sampler, Mapping):
        config["entropy_bound"] = sampler.get("entropy_bound")
    found: dict[str, Any] = {}
    for field, (hf, gguf, low, high) in SCHEDULE.items():
        key = f"diffusion.eb_{gguf}" if hparams.is_gguf else hf
        value = hparams.weights.metadata.get(key) if hparams.is_gguf else config.get(key)
        default = getattr(EntropyBound(), field)
        read = _whole if isinstance(default, int) else _number
        found[field] = read(hparams, key, value, low, high, default=default)
    schedule = EntropyBound(**found)
    if schedule.max_temperature <= schedule.min_temperature:
        raise hparams.format_error(
            f"t_max is {schedule.max_temperature:g}, t_min {schedule.min_temperature:g}; the first must be larger"
        )
    return schedule


def _whole(hparams: HParams, key: str, value: Any, low: float, high: float, *, default: int) -> int:
    number = _number(hparams, key, value, low, high, default=default)
    if number != int(number):
        raise hparams.format_error(f"{key} is {short(value)}; expected a whole number")
    return int(number)


def _number(hparams: HParams, key: str, value: Any, low: float, high: float, *, default: float) -> float:
    if value is None:
        return default
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool | np.bool_)
    if not is_number or not low <= value <= high:  # NaN is in no range
        raise hparams.format_error(f"{key} is {short(value)}; expected a number from {low:g} to {high:g}")
    return float(value)
