"""Temperature, filters and the random choice on the device: kvarn.sampling.filters for many rows at once.

Candidates stay in their places, sorted, the most probable first; a filter takes some out of `kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import RowSampling
from kvarn.sampling.philox import uniform
from kvarn.sampling.sampler import applies_xtc

Scan = Callable[[Tensor], Tensor]


def choose_candidates(logits: Tensor, params: Sequence[RowSampling], scan: Scan) -> tuple[Tensor, Tensor]:
    """A random token for each row, and whether it counts: not where dividing by the temperature overflows."""
    scaled = logits / _column(params, "temperature", logits).float()
    is_sampled = torch.isfinite(scaled.amax(dim=-1))
    ordered, ids = torch.sort(torch.where(is_sampled[:, None], scaled, 0.0), dim=-1, descending=True, stable=True)
    ranks = torch.arange(ids.shape[1], device=ids.device)
    top_k = [row.top_k if row.top_k > 0 else ids.shape[1] for row in params]
    is_masked = torch.tensor([row.mask is not None for row in params], device=ids.device)[:, None]
    kept = (ranks < torch.tensor(top_k, device=ids.device)[:, None]) & (~is_masked | (ordered > -torch.inf))
    logs = ordered.double() - ordered[:, :1].double()
    weights = torch.exp(logs)
    kept = _filter(kept, weights, logs, params, scan)
    cumulative = scan(torch.where(kept, weights, 0.0))
    draws = [uniform(row.seed, row.position, row.choice, draw=row.draw) for row in params]
    place = _reach(cumulative, torch.tensor(draws, dtype=torch.float64, device=ids.device), kept)
    return ids.gather(1, place[:, None])[:, 0], is_sampled


def _filter(kept: Tensor, weights: Tensor, logs: Tensor, params: Sequence[RowSampling], scan: Scan) -> Tensor:
    """Each filter over what the one before kept; rows that do not ask for it pass."""
    device = kept.device
    typical, top_p, min_p = (_column(params, name, kept) for name in ("typical_p", "top_p", "min_p"))
    if any(np.float32(row.typical_p) < 1.0 for row in params):
        kept = torch.where(typical >= 1.0, kept, kept & _is_typical(kept, weights, logs, typical, scan))
    if any(np.float32(row.top_p) < 1.0 for row in params):
        last = _reach(scan(torch.where(kept, weights, 0.0)), top_p[:, 0], kept)
        kept = kept & ((top_p >= 1.0) | (torch.arange(kept.shape[1], device=device) <= last[:, None]))
    if any(row.min_p > 0.0 for row in params):
        kept = kept & (weights >= min_p * weights.gather(1, _first(kept)[:, None]))
    crossed = [applies_xtc(row) for row in params]
    if any(crossed):
        least = _column(params, "xtc_threshold", kept) * scan(torch.where(kept, weights, 0.0))[:, -1:]
        num_above = (kept & (weights >= least)).sum(dim=-1, keepdim=True)
        number = torch.cumsum(kept, dim=-1) - 1
        kept = kept & (~torch.tensor(crossed, device=device)[:, None] | (number >= num_above - 1))
    return kept


def _is_typical(kept: Tensor, weights: Tensor, logs: Tensor, mass: Tensor, scan: Scan) -> Tensor:
    held = torch.where(kept, weights, 0.0)
    total = scan(held)[:, -1:]
    finite = torch.where(held > 0, logs, 0.0)
    entropy = torch.log(total) - scan(held * finite)[:, -1:] / total
    distance = torch.where(kept, torch.abs(torch.log(total) - logs - entropy), torch.inf)
    order = torch.argsort(distance, dim=-1, stable=True)
    in_order = kept.gather(1, order)
    last = _reach(scan(held.gather(1, order)), mass[:, 0], in_order)
    found = in_order & (torch.arange(kept.shape[1], device=kept.device) <= last[:, None])
    return torch.zeros_like(kept).scatter_(1, order, found)


def _reach(cumulative: Tensor, share: Tensor, kept: Tensor) -> Tensor:
    """The place of the first candidate at which the running sum reaches a share of the whole."""
    place = (cumulative < (share * cumulative[:, -1])[:, None]).sum(dim=-1)
    return torch.maximum(place.clamp(max=kept.shape[1] - 1), _first(kept))


def _first(kept: Tensor) -> Tensor:
    return kept.to(torch.int8).argmax(dim=-1)


def _column(params: Sequence[RowSampling], name: str, like: Tensor) -> Tensor:
    """One parameter of every row, rounded to float32 first, (rows, 1) in float64."""
    values = np.array([getattr(row, name) for row in params], np.float32).astype(np.float64)
    return torch.from_numpy(values).to(like.device)[:, None]
