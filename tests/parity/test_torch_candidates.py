"""Most rows are settled by their most probable tokens; the choice is the definition's whether they are or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import RowSampling, SampleRows
from kvarn.sampling.sampler import choose

torch = pytest.importorskip("torch")

VOCAB, ROWS = 300, 60
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 60},
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 0.001},
    {"typical_p": 0.8},
    {"top_k": 40, "top_p": 0.95},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0], ids=["all equal", "flat", "peaked"])
def test_the_most_probable_tokens_decide_as_the_whole_row_does(
    filters: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarn.backends.torch import candidates
    from kvarn.backends.torch.sampling import sample_rows

    monkeypatch.setattr(candidates, "TOP", 32)
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(0, spread, (ROWS, VOCAB)), 1).astype(np.float32)  # many ties
    params = [RowSampling(temperature=0.8, seed=i, position=i, mask=_mask(rng, i), **filters) for i in range(ROWS)]
    rows = SampleRows(np.arange(ROWS, dtype=np.int32), tuple(params))
    sampled = sample_rows(lambda wanted: torch.from_numpy(logits)[wanted], rows, torch.device("cpu"))
    assert sampled.token_ids.tolist() == [choose(row, one) for row, one in zip(logits, params, strict=True)]
    if spread == 3.0 and filters in ({"top_k": 5}, {"min_p": 0.2}):
        assert not sampled.late
    if spread == 0.0 and filters == {}:
        assert len(sampled.late) > ROWS // 2


def _mask(rng: np.random.Generator, number: int) -> Any:
    """Every third row may choose among few tokens only."""
    if number % 3:
        return None
    allowed = rng.random(320) < (0.05 if number % 2 else 0.5)
    allowed[7] = True
    return np.packbits(allowed, bitorder="little").view("<u4")
