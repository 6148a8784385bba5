"""What is left makes good what went: columns that stay are fitted anew to the outputs of the whole matrix.

For inputs x with moments M = E[x x^T], kept columns K: the W' of least E|W x - W' x_K|^2 is W M[:, K] M[K, K]^-1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

DAMPING = 0.01  # of the mean of the diagonal, as in GPTQ: a text has not seen everything


def refitted(weights: Float32, moments: Float32, columns: npt.NDArray[np.int64]) -> Float32:
    """The kept columns of a matrix, fitted to all of it; (rows, kept)."""
    kept = moments[np.ix_(columns, columns)].astype(np.float64)
    damping = DAMPING * float(kept.diagonal().mean()) or 1.0
    gone = np.setdiff1d(np.arange(weights.shape[1]), columns)
    # Only what the removed columns did is distributed, so that damping pulls towards the weights as they are.
    target = weights[:, gone].astype(np.float64) @ moments[np.ix_(gone, columns)]
    kept[np.diag_indices_from(kept)] += damping
    change = np.linalg.solve(kept, target.T).T
    return (weights[:, columns] + change).astype(np.float32)
