"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: for texts their positions are those of Qwen2 and Qwen3."""

from __future__ import annotations

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures import qwen2, qwen3
from kvarn.models.hparams import HParams
from kvarn.models.spec import ModelSpec
from kvarn.models.tensors.turned_experts import turn_experts

NOTE = "the text part of a model that also reads images: images are not read"


def describe_2(hparams: HParams) -> ModelSpec:
    """Describe the text part of a Qwen2-VL or Qwen2.5-VL."""
    hparams.notes[NOTE] = None
    return qwen2.described(hparams)


def describe_3(hparams: HParams) -> ModelSpec:
    """Describe the text part of a Qwen3-VL, dense or with experts."""
    hparams.notes[NOTE] = None
    return qwen3.describe(hparams)


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """The experts of published folders are turned, those that others write are not."""
    return turn_experts(spec, view, "either")
