"""From an open model file to its ModelSpec and its weights under canonical names, all of it checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.errors import ConfigError, FormatError, ModelError
from kvarn.formats.hf_names import canonical_view
from kvarn.formats.tensor_view import WeightView, renamed, shifted
from kvarn.formats.weights import WeightSource, conversions
from kvarn.models.architectures.draft_layer import draft_spec, draft_view
from kvarn.models.architectures.entry import Architecture
from kvarn.models.hparams import HParams
from kvarn.models.recurrent import kv_layers, state_layers
from kvarn.models.registry import find_architecture
from kvarn.models.sampling_defaults import recommended_sampling
from kvarn.models.spec import ModelSpec
from kvarn.models.tensors.fused import separate_tensors
from kvarn.models.tensors.shapes import check_tensors

# Where a head is compared with the embedding: all of it would be read from the disk for nothing.
HEAD_SAMPLES = 256
SAMPLE_BYTES = 4096
TEXT_ONLY = "the text part of a model that also reads images or sounds: they are not read, their tensors are left out"


@dataclass(frozen=True, slots=True)
class Description:
    """A model that was checked. recommended: SamplingParams fields the model's authors suggest.

    notes: what a user should know about how it is run. draft: the layer that predicts further tokens, as a model.
    """

    spec: ModelSpec
    weights: WeightSource
    recommended: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    draft: Description | None = None


def describe(source: WeightSource, context: int | None = None) -> Description:
    """Describe a model. context is the length it will be used with; some models choose their rope by it."""
    if context is not None and context < 1:
        raise ConfigError(f"context is {context}; give a positive number of tokens")
    name, architecture = find_architecture(source)
    view = _canonical(source, architecture)
    hparams = HParams(view, name, context)
    hparams.notes.update(dict.fromkeys(conversions(source)))
    if any(part in (source.metadata.get("hf") or {}) for part in ("vision_config", "audio_config")):
        hparams.notes[TEXT_ONLY] = None
    spec = architecture.describe(hparams)
    hparams.refuse_unread_keys()
    if not any(heads for heads, _ in kv_layers(spec)) and not state_layers(spec):
        raise hparams.unsupported("no layer of the model has attention or a state", "layer_types")
    if spec.head is not None and spec.head.tied:
        view = _without_copied_head(view)
    draft = _draft_layer(spec, view, architecture, hparams.notes)
    view = _separated(spec, view, architecture)
    return Description(spec, view, recommended_sampling(source), tuple(hparams.notes), draft)


def _draft_layer(
    spec: ModelSpec, view: WeightView, architecture: Architecture, notes: dict[str, None]
) -> Description | None:
    """Describe the layer that predicts further tokens as a model of its own; a damaged one is as good as none."""
    if spec.draft is None:
        return None
    own = draft_spec(spec)
    try:
        return Description(own, _separated(own, draft_view(spec, view), architecture))
    except ModelError as error:
        notes[f"the layer that predicts further tokens is left out: {error}"] = None
        return None


def _separated(spec: ModelSpec, view: WeightView, architecture: Architecture) -> WeightView:
    """The tensors that the spec has, each on its own, all of them checked."""
    if architecture.split is not None:
        view = architecture.split(spec, view)
    view = separate_tensors(spec, view)
    check_tensors(spec, view)
    return view


def _canonical(source: WeightSource, architecture: Architecture) -> WeightView:
    """GGUF's names are canonical, but for a few; safetensors are renamed and their norms shifted."""
    if source.metadata.get("hf") is None:
        names = {name: _gguf_name(name, architecture.gguf_names) for name in source.tensors}
        return WeightView(source, {names[name]: renamed(info, names[name]) for name, info in source.tensors.items()})
    entries = canonical_view(source, architecture.dialect).entries
    if architecture.hf_norm_offset:
        for name, entry in entries.items():
            if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
                entries[name] = shifted(entry, architecture.hf_norm_offset)
    return WeightView(source, entries)


def _gguf_name(name: str, changed: Mapping[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    layer, _, tensor = stem.rpartition(".")
    return f"{layer}.{changed[tensor]}.{suffix}" if tensor in changed else name


def _without_copied_head(view: WeightView) -> WeightView:
    """Drop the output matrix of a tied model: some folders have a copy of the embedding under this name."""
    if "output.weight" not in view.entries:
        return view
    embedding, head = (view.raw(name) for name in ("token_embd.weight", "output.weight"))
    step = max(1, embedding.size // HEAD_SAMPLES)
    is_copy = embedding.size == head.size and all(
        np.array_equal(embedding[first : first + SAMPLE_BYTES], head[first : first + SAMPLE_BYTES])
        for first in range(0, embedding.size, step)
    )
    if not is_copy:
        raise FormatError(
            "tie_word_embeddings is true, but lm_head.weight is not a copy of the embedding; set it to false to use it",
            file=view.path,
        )
    return WeightView(view.source, {name: entry for name, entry in view.entries.items() if name != "output.weight"})
