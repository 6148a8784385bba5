"""Speculation changes no byte of real models either: the matrix of tests/parity/test_speculation.py at full size.

The draft model is the model without a few of its layers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.prune import prune
from tests.assets import qwen_coder, smollm2
from tests.parity.test_speculation import (
    DRAFT_MODELS,
    KINDS,
    MISTAKES,
    Model,
    bytes_of,
    check_no_drafter_changes_a_byte,
    eager,
    run,
)

pytestmark = [pytest.mark.long, pytest.mark.model]

MODELS = {"smollm2": (smollm2, 4), "qwen2.5-coder-0.5b": (qwen_coder, 3)}  # and how many layers the draft has less


@pytest.fixture(scope="module", params=list(MODELS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    find, num_layers = MODELS[request.param]
    pruned, text = tmp_path_factory.mktemp("draft") / "pruned.gguf", Path(__file__).parents[2] / "README.md"
    prune(find(), PruneTarget(layers=num_layers), pruned, options=PruneOptions(text=[text], refit=False, threads=1))
    return Model(find(), pruned, kv_bytes=96 << 20)  # drafts are computed in blocks that nobody else may need


@pytest.mark.parametrize("drafter", ["real", *MISTAKES, *DRAFT_MODELS])
@pytest.mark.parametrize("way", ["alone", "batched", "preempted", "chunked"])
def test_no_drafter_changes_a_byte_of_a_real_model(real: Model, drafter: str, way: str) -> None:
    check_no_drafter_changes_a_byte(real, drafter, way, rounds=1)


@pytest.mark.parametrize("drafter", ["real", "partly right", *DRAFT_MODELS])
def test_several_answers_of_a_real_model_are_what_they_would_be(real: Model, drafter: str) -> None:
    params = KINDS["temperature 1"].replace(n=4)
    found = []
    for model in (real.load("off"), eager(real, drafter)):
        found.append([bytes_of(one) for one in run(model.engine, real.submit_all(model, params))])
        model.close()
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
