"""Speculation changes no byte of real models either: the matrix of tests/parity/test_speculation.py at full size.

The draft model is the model without a few of its layers. Every cell that holds is added to the model's results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.prune import prune
from tests.assets import qwen_coder, smollm2
from tests.conftest import Record
from tests.parity.test_speculation import (
    DRAFT_MODELS,
    KINDS,
    MISTAKES,
    WAYS,
    Counts,
    Model,
    check_no_drafter_changes_a_byte,
    check_several_answers,
)

pytestmark = [pytest.mark.long, pytest.mark.model]

MODELS = {"smollm2": (smollm2, 4), "qwen-coder": (qwen_coder, 3)}  # and how many layers the draft has less
Tell = Callable[[str, Counts], None]


class RealModel:
    """A model, its pruned copy, and the cells of the matrix that were computed."""

    def __init__(self, name: str, folder: Path) -> None:
        find, num_layers = MODELS[name]
        pruned, text = folder / "pruned.gguf", Path(__file__).parents[2] / "README.md"
        prune(find(), PruneTarget(layers=num_layers), pruned, options=PruneOptions(text=[text], refit=False, threads=1))
        self.name, self.cells = name, dict[str, Counts]()
        self.model = Model(find(), pruned, kv_bytes=96 << 20)  # drafts take blocks that nobody else may need


@pytest.fixture(scope="module", params=list(MODELS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    return RealModel(request.param, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def tell(real: RealModel, record: Record) -> Tell:
    def add(cell: str, counts: Counts) -> None:
        real.cells[cell] = counts
        figures = {"model": real.model.path.name, "kinds": list(KINDS), "cells": real.cells}
        record(f"speculation-bytes-{real.name}", figures | {"num_cells": len(real.cells)})

    return add


@WAYS
@pytest.mark.parametrize("drafter", ["real", *MISTAKES, *DRAFT_MODELS])
def test_no_drafter_changes_a_byte_of_a_real_model(real: RealModel, drafter: str, way: str, tell: Tell) -> None:
    tell(f"{drafter}, {way}", check_no_drafter_changes_a_byte(real.model, drafter, way, rounds=1))


@WAYS
@pytest.mark.parametrize("drafter", ["real", "partly right", *DRAFT_MODELS])
def test_several_answers_of_a_real_model_are_what_they_would_be(
    real: RealModel, drafter: str, way: str, tell: Tell
) -> None:
    tell(f"{drafter}, n = 4, {way}", check_several_answers(real.model, drafter, way, rounds=1))
