"""One architecture as the registry has it: its names, how it is described, how its tensors differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvarn.formats.hf_names import Dialect
from kvarn.formats.tensor_view import WeightView
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is recognised and described. title: the models people know it by.

    oracle: with what its tests compare its logits.
    hf_norm_offset: what safetensors subtract from norm weights. gguf_names: how GGUF calls some of a layer's tensors.
    """

    title: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    describe: Callable[[HParams], ModelSpec]
    dialect: Dialect = "decoder"
    hf_norm_offset: float = 0.0
    split: Callable[[ModelSpec, WeightView], WeightView] | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    oracle: str = "transformers"
