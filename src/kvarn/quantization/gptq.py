"""GPTQ's error feedback on the grids of stored blocks: what rounding a column gets wrong, the next columns make good.

Scales come from the usual search. The columns are then rounded one after another to their block's grid, the most
important ones first. With H = U D U^T, U upper triangular with ones, H the second moments of what the matrix reads,
column k is rounded at w_k + sum over i < k of (w_i - q_i) U_ik: GPTQ without the inverse of H (LDLQ, Chee et al. 2023).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.formats.stored_grids import StoredGrid, grid_of, with_quants
from kvarn.formats.weights import TensorType

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

DAMPING = 0.01  # of H's mean diagonal, added to it: what the text has not shown is not thought impossible
COLUMNS_AT_ONCE = 32  # are corrected together by those before: products of matrices instead of vectors
ROWS_AT_ONCE = 2048


class ErrorFeedback:
    """For matrices that read one input. moments: (columns, columns), the mean of x x^T."""

    def __init__(self, moments: npt.NDArray[np.float32]) -> None:
        matrix = moments.astype(np.float64)
        diagonal = matrix.diagonal().copy()
        mean = float(diagonal.mean()) or 1.0
        matrix[np.diag_indices_from(matrix)] += DAMPING * mean
        self._order = np.argsort(-diagonal, kind="stable")
        ordered = matrix[np.ix_(self._order, self._order)]
        # Reversed, H = L L^T; L reversed back is upper triangular, and its columns over their diagonal are U's.
        upper = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
        self._upper: Float32 = np.ascontiguousarray(upper / upper.diagonal(), np.float32)

    def rounded(self, values: Float32, stored: Bytes, type: TensorType) -> Bytes:
        """Bytes with the scales of `stored` and quants that answer each other's errors; values: (rows, columns)."""
        pieces = [
            self._rounded(values[at : at + ROWS_AT_ONCE], piece, type)
            for at, piece in _slices(stored.reshape(len(values), -1))
        ]
        return np.concatenate(pieces)

    def _rounded(self, values: Float32, stored: Bytes, type: TensorType) -> Bytes:
        blocks = stored.reshape(-1, type.block_bytes)
        grid, shape = grid_of(blocks, type), values.shape
        columns = _Columns(values, grid, self._order)
        for begin in range(0, shape[1], COLUMNS_AT_ONCE):
            columns.round(begin, min(begin + COLUMNS_AT_ONCE, shape[1]), self._upper)
        quants = np.empty(shape[::-1], np.uint8)
        quants[self._order] = columns.quants
        return with_quants(blocks, type, np.ascontiguousarray(quants.T).reshape(-1, type.block_values)).reshape(-1)


class _Columns:
    """A matrix column by column, in the order they are rounded: arrays are (columns, rows), scales (groups, rows)."""

    def __init__(self, values: Float32, grid: StoredGrid, order: npt.NDArray[np.int64]) -> None:
        self._w = np.ascontiguousarray(values.T)[order]
        self._scales, self._lows = (
            np.ascontiguousarray(part.reshape(len(values), -1).T) for part in (grid.scales, grid.lows)
        )
        self._inverses = np.divide(1, self._scales, out=np.zeros_like(self._scales), where=self._scales != 0)
        self._groups = order // grid.group
        self._levels, self._is_uniform = grid.levels, grid.is_uniform
        self._middles = (grid.levels[1:] + grid.levels[:-1]) / 2
        self._errors = np.empty_like(self._w)
        self.quants = np.empty(self._w.shape, np.uint8)

    def round(self, begin: int, end: int, upper: Float32) -> None:
        """Round columns begin .. end, which make good what all before them got wrong."""
        corrections = upper[:begin, begin:end].T @ self._errors[:begin]
        for j in range(begin, end):
            own = upper[begin:j, j] @ self._errors[begin:j]
            self._errors[j] = self._w[j] - self._nearest(j, self._w[j] + corrections[j - begin] + own)

    def _nearest(self, j: int, target: Float32) -> Float32:
        group = self._groups[j]
        low = self._lows[group]
        wanted = (target - low) * self._inverses[group]
        if self._is_uniform:
            levels = np.clip(np.rint(wanted, out=wanted), self._levels[0], self._levels[-1], out=wanted)
            self.quants[j] = levels - self._levels[0]
        else:
            self.quants[j] = np.searchsorted(self._middles, wanted)
            levels = self._levels[self.quants[j]]
        found: Float32 = self._scales[group] * levels + low
        return found


def _slices(stored: Bytes) -> list[tuple[int, Bytes]]:
    return [(at, stored[at : at + ROWS_AT_ONCE].reshape(-1)) for at in range(0, len(stored), ROWS_AT_ONCE)]
