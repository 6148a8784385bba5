"""Files of a model with tensors that are missing or of other shapes: each must be refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.errors import ModelError
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.tensors.shapes import FOLDED
from tests.unit.models.edited import Edited


def assert_damage_is_refused(source: WeightSource, seed: int) -> None:
    """Four tensors of the source, each missing and each with a longer last axis."""
    names = [name for name in source.tensors if name not in FOLDED]
    for name in [names[int(i)] for i in np.random.default_rng(seed).integers(0, len(names), 4)]:
        *stem, last = source.tensors[name].shape
        for shape in (None, (*stem, last + 32)):
            if shape is None and _may_be_missing(name, names):
                continue
            with pytest.raises(ModelError, match=r"tensor") as error:
                describe(Edited(source, shapes={name: shape}))
            assert len(str(error.value)) < 600


def _may_be_missing(name: str, names: list[str]) -> bool:
    """Without it the file has another model: a tied head, values that are the keys, no bias in any layer."""
    is_only = sum(other.endswith(f".{name.split('.', 2)[-1]}") for other in names) == 1
    return name.startswith("output.") or name.endswith("attn_v.weight") or (name.endswith(".bias") and is_only)
