"""Temperature, filters and the random choice on the device: kvarn.sampling.filters for many rows at once.

Candidates stay in their places, sorted, the most probable first; a filter takes some out of `kept`. The TOP most
probable are looked at first, and rows whose choice they do not settle are sorted whole. Nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import RowSampling
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.elementwise import exp
from kvarn.sampling.philox import uniform
from kvarn.sampling.sampler import applies_xtc

TOP = 1024

Scan = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """The first tokens of each row in order, and the weight of the whole row; weights are relative to the first."""

    ids: Tensor  # (rows, candidates)
    logs: Tensor  # (rows, candidates) logarithms of the weights
    is_known: Tensor  # (rows, candidates) bool: its place in the order is certain
    is_complete: Tensor  # (rows, 1) bool: no token is missing
    total: Tensor  # (rows, 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A token for each row."""

    ids: Tensor
    counts: Tensor  # bool: not where dividing by the temperature overflows
    is_settled: Tensor  # bool: no token that was not looked at could have changed it


def choose_candidates(logits: Tensor, params: Sequence[RowSampling], scan: Scan, *, whole: bool = False) -> Choice:
    """Choose at random; whole: among all tokens, which settles every row."""
    scaled = logits / _column(params, "temperature", logits).float()
    counts = torch.isfinite(scaled.amax(dim=-1))
    scaled = torch.where(counts[:, None], scaled, 0.0)
    if whole or scaled.shape[1] <= TOP + 1:
        return Choice(_choose(_sort_all(scaled, params), params, scan)[0], counts, torch.ones_like(counts))
    ids, is_settled = _choose(_sort_top(scaled, params, scan), params, scan)
    return Choice(ids, counts, is_settled | ~counts)


def _sort_all(scaled: Tensor, params: Sequence[RowSampling]) -> SortedTokens:
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    is_masked = on_device([row.mask is not None for row in params], ids.device)[:, None]
    logs = ordered.double() - ordered[:, :1].double()
    everything = torch.ones((len(params), 1), dtype=torch.bool, device=ids.device)
    return SortedTokens(ids, logs, ~is_masked | (ordered > -torch.inf), everything, torch.zeros_like(logs[:, :1]))


def _sort_top(scaled: Tensor, params: Sequence[RowSampling], scan: Scan) -> SortedTokens:
    """Those larger than the next one after them: which of several equal ones come first is not known there."""
    values, ids = torch.topk(scaled, TOP + 1, dim=-1)
    ids, order = torch.sort(ids, dim=-1)
    ordered, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    next_one = ordered[:, -1:]
    logs = ordered.double() - ordered[:, :1].double()
    total = scan(exp(scaled.double() - ordered[:, :1].double()))[:, -1:]
    is_masked = on_device([row.mask is not None for row in params], ids.device)[:, None]
    return SortedTokens(ids.gather(1, order), logs, ordered > next_one, is_masked & (next_one == -torch.inf), total)


def _choose(found: SortedTokens, params: Sequence[RowSampling], scan: Scan) -> tuple[Tensor, Tensor]:
    """A token for each row, and whether no missing token could have changed it."""
    device = found.ids.device
    weights = exp(found.logs)
    kept, is_complete = _filter(found, weights, params, scan)
    cumulative = scan(torch.where(kept, weights, 0.0))
    total = torch.where(is_complete, cumulative[:, -1:], found.total)
    draws = [uniform(row.seed, row.position, row.choice, draw=row.draw) for row in params]
    target = on_device(draws, device)[:, None] * total
    place = _reach(cumulative, target, kept)
    is_plain = on_device([_is_unfiltered(row) for row in params], device)[:, None]
    is_settled = is_complete | (is_plain & (cumulative[:, -1:] >= target))
    return found.ids.gather(1, place)[:, 0], is_settled[:, 0]


def _is_unfiltered(row: RowSampling) -> bool:
    return row.top_k == 0 and row.top_p >= 1.0 and row.min_p == 0.0 and row.typical_p >= 1.0 and not applies_xtc(row)


def _filter(found: SortedTokens, weights: Tensor, params: Sequence[RowSampling], scan: Scan) -> tuple[Tensor, Tensor]:
    """What the filters keep, each of what the one before kept, and whether that is all they would keep.

    Where tokens are missing, top_p and min_p can still tell, but not behind a filter that needed the missing ones.
    """
    kept, ranks = found.is_known, torch.arange(found.ids.shape[1], device=found.ids.device)
    most = on_device([row.top_k if row.top_k > 0 else 2**31 for row in params], kept.device)[:, None]
    is_complete = found.is_complete | (kept.sum(dim=-1, keepdim=True) >= most)
    needs_all = [row.top_k > 0 or row.typical_p < 1.0 or applies_xtc(row) for row in params]
    is_lost = on_device(needs_all, kept.device)[:, None] & ~is_complete
    kept = kept & (ranks < most)
    typical, top_p, min_p = (_column(params, name, kept) for name in ("typical_p", "top_p", "min_p"))
    if any(np.float32(row.typical_p) < 1.0 for row in params):
        kept = torch.where(typical >= 1.0, kept, kept & _is_typical(kept, weights, found.logs, typical, scan))
    if any(np.float32(row.top_p) < 1.0 for row in params):
        cumulative = scan(torch.where(kept, weights, 0.0))
        target = top_p * torch.where(is_complete, cumulative[:, -1:], found.total)
        last = _reach(cumulative, target, kept)
        is_complete = is_complete | ((top_p < 1.0) & (cumulative[:, -1:] >= target))
        kept = kept & ((top_p >= 1.0) | (ranks <= last))
    if any(row.min_p > 0.0 for row in params):
        least = min_p * weights.gather(1, _first(kept))
        is_complete = is_complete | (torch.where(found.is_known, weights, 1.0).amin(dim=-1, keepdim=True) < least)
        kept = kept & (weights >= least)
    return _drop_top_choices(kept, weights, params, scan), is_complete & ~is_lost


def _drop_top_choices(kept: Tensor, weights: Tensor, params: Sequence[RowSampling], scan: Scan) -> Tensor:
    """XTC: those at least so probable, but the last of them."""
    crossed = [applies_xtc(row) for row in params]
    if not any(crossed):
        return kept
    least = _column(params, "xtc_threshold", kept) * scan(torch.where(kept, weights, 0.0))[:, -1:]
    num_above = (kept & (weights >= least)).sum(dim=-1, keepdim=True)
    number = torch.cumsum(kept, dim=-1) - 1
    return kept & (~on_device(crossed, kept.device)[:, None] | (number >= num_above - 1))


def _is_typical(kept: Tensor, weights: Tensor, logs: Tensor, mass: Tensor, scan: Scan) -> Tensor:
    held = torch.where(kept, weights, 0.0)
    total = scan(held)[:, -1:]
    finite = torch.where(held > 0, logs, 0.0)
    entropy = torch.log(total) - scan(held * finite)[:, -1:] / total
    distance = torch.where(kept, torch.abs(torch.log(total) - logs - entropy), torch.inf)
    order = torch.argsort(distance, dim=-1, stable=True)
    in_order, cumulative = kept.gather(1, order), scan(held.gather(1, order))
    last = _reach(cumulative, mass * cumulative[:, -1:], in_order)
    found = in_order & (torch.arange(kept.shape[1], device=kept.device) <= last)
    return torch.zeros_like(kept).scatter_(1, order, found)


def _reach(cumulative: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    """The place of the first candidate at which the running sum reaches the target, (rows, 1)."""
    place = (cumulative < target).sum(dim=-1, keepdim=True)
    return torch.maximum(place.clamp(max=kept.shape[1] - 1), _first(kept))


def _first(kept: Tensor) -> Tensor:
    return kept.to(torch.int8).argmax(dim=-1, keepdim=True)


def _column(params: Sequence[RowSampling], name: str, like: Tensor) -> Tensor:
    """One parameter of every row, rounded to float32 first, (rows, 1) in float64."""
    values = np.array([getattr(row, name) for row in params], np.float32).astype(np.float64)
    return on_device(values, like.device)[:, None]
