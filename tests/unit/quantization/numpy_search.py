"""The searches of csrc/quant in NumPy, float32 and one block's values in a row: an oracle to the last bit.

Written from the description of the formats: candidates of a scale are tried in order, each judged by weighted least
squares, and every sum runs over a block's values from first to last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
F = np.float32


def sequential_sum(values: Floats) -> Floats:
    """Over the last axis, from left to right."""
    total = np.zeros(values.shape[:-1], F)
    for i in range(values.shape[-1]):
        total = total + values[..., i]
    return total


def affine(x: Floats, w: Floats, steps: tuple[int, float, float, int], *, absolute: bool = False) -> tuple[Floats, ...]:
    """Scale and minimum (>= 0) of each block, (blocks, n): x ~ scale * q - minimum."""
    max_quant, first, step, count = steps
    with np.errstate(all="ignore"):
        low, high = np.minimum(x.min(-1), F(0)), x.max(-1)
        sum_w, sum_x = sequential_sum(w), sequential_sum(w * x)
        is_flat, origin = high == low, low.copy()
        scale = F(1) / (F(max_quant) / (high - low))
        q = _quants((F(max_quant) / (high - low))[:, None] * (x - low[:, None]), 0, max_quant)
        best = _affine_error(x, w, q, scale, low, absolute=absolute)
        for t in range(count + 1):
            grid = F(F(F(first) + F(F(step) * F(t))) + F(max_quant)) / (high - low)
            q = _quants(grid[:, None] * (x - low[:, None]), 0, max_quant)
            sum_l, sum_l2, sum_xl = (sequential_sum(term) for term in (w * q, w * q * q, w * q * x))
            determinant = sum_w * sum_l2 - sum_l * sum_l
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            new_scale = np.where(new_low > 0, sum_xl / sum_l2, new_scale)
            new_low = np.where(new_low > 0, F(0), new_low)
            error = _affine_error(x, w, q, new_scale, new_low, absolute=absolute)
            better = (determinant > 0) & (error < best)
            best, scale, low = (
                np.where(better, new, old) for new, old in ((error, best), (new_scale, scale), (new_low, low))
            )
        return np.where(is_flat, F(0), scale), -np.where(is_flat, origin, low)


def symmetric(x: Floats, middle: int) -> Floats:
    """Scale of each block, (blocks, n): x ~ scale * q, q from -middle; errors weigh as the value's square."""
    with np.errstate(all="ignore"):
        peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)[:, 0]
        w = x * x
        sum_lx, sum_l2 = _symmetric_sums(x, w, F(-middle) / peak, middle)
        scale = np.where(sum_l2 != 0, sum_lx / sum_l2, F(0))
        merit = scale * sum_lx
        for t in (*range(-9, 0), *range(1, 10)):
            sum_lx, sum_l2 = _symmetric_sums(x, w, F(-F(F(middle) + F(F(0.1) * F(t)))) / peak, middle)
            better = (sum_l2 > 0) & (sum_lx * sum_lx > merit * sum_l2)
            scale = np.where(better, sum_lx / sum_l2, scale)
            merit = np.where(better, scale * sum_lx, merit)
        return np.where(np.abs(peak) < F(1e-15), F(0), scale)


def _symmetric_sums(x: Floats, w: Floats, grid: Floats, middle: int) -> tuple[Floats, Floats]:
    q = _quants(grid[:, None] * x, -middle, middle - 1)
    return sequential_sum(w * x * q), sequential_sum(w * q * q)


def _affine_error(x: Floats, w: Floats, q: Floats, scale: Floats, low: Floats, *, absolute: bool) -> Floats:
    error = scale[:, None] * q + low[:, None] - x
    return sequential_sum(w * (np.abs(error) if absolute else error * error))


def _quants(values: Floats, low: int, high: int) -> Floats:
    return np.clip(np.rint(values), F(low), F(high))
