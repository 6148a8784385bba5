"""From one hidden state per token to one vector per text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvarn.models.spec import Pooling


def pool_rows(
    hidden: npt.NDArray[np.float32], row_starts: npt.NDArray[np.int32], pooling: Pooling
) -> npt.NDArray[np.float32]:
    """Pool the rows of each sequence: their mean, the first (cls) or the last."""
    ranges = list(pairwise(row_starts))
    if pooling == "mean":
        vectors = [hidden[begin:end].mean(axis=0, dtype=np.float64) for begin, end in ranges]
    elif pooling == "cls":
        vectors = [hidden[begin] for begin, _ in ranges]
    else:
        vectors = [hidden[end - 1] for _, end in ranges]
    return np.stack(vectors).astype(np.float32)
