"""The sampling a model's authors recommend: general.sampling.* of GGUF, generation_config.json of a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from kvarn.errors import FormatError, InvalidParameter
from kvarn.formats.strict_json import read_optional
from kvarn.formats.weights import WeightSource
from kvarn.types import SamplingParams

GGUF_KEYS: Final[Mapping[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
HF_KEYS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

DIFFUSION_DEFAULTS: Mapping[str, float] = {"temperature": 0.0, "top_p": 1.0}  # of diffusion models, as published


def recommended_sampling(source: WeightSource) -> dict[str, Any]:
    """Return the SamplingParams fields recommended; values out of range are an error of the file."""
    if "hf" in source.metadata:
        config = _generation_config(source)
        found = {key: config[key] for key in HF_KEYS if config.get(key) is not None}
        if config.get("do_sample") is False:
            found.pop("temperature", None)
    else:
        found = {name: source.metadata[key] for key, name in GGUF_KEYS.items() if key in source.metadata}
    try:
        SamplingParams(**found)
    except InvalidParameter as error:
        raise FormatError(f"recommended sampling: {error}", file=source.path) from None
    return found


def _generation_config(source: WeightSource) -> Mapping[str, Any]:
    folder = source.metadata.get("hf_folder")
    return {} if folder is None else read_optional(os.path.join(folder, "generation_config.json"))
