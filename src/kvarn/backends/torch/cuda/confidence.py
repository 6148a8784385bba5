"""The most probable token of every row but one, its log-probability among all, and the entropy: two kernels.

Weights and sums are float64, as sampling.log_softmax has them. A row is added up in parts of COLUMNS by absolute
column, merged in one order, so its bits do not depend on the rows beside it; they differ from those of a scan from left
to right by about 1e-13 of the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN

COLUMNS = 4096  # of one program


def most_confident(logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (rows) int32, log-probabilities and entropies (rows) float32 of logits (rows, vocabulary) float32.

    NO_TOKEN, 0 and 0 where a logit is not finite; equal logits go to the lower id.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, COLUMNS)
    device = logits.device
    # best, ids, peaks, sums, moments. Each a tensor of its own: how a kernel loads, and so the order in which it adds,
    # depends on the alignment of its pointers, which must not depend on the number of rows.
    types = (torch.float32, torch.int32, torch.float32, torch.float64, torch.float64)
    found = [torch.empty(rows, parts, device=device, dtype=type) for type in types]
    chosen, logprobs, entropies = (torch.empty(rows, device=device, dtype=type) for type in (types[1], *types[:1] * 2))
    stride = logits.stride(0)
    _score_part[(rows, parts)](logits, *found, vocabulary, stride, parts, banned, SIZE=COLUMNS, num_warps=8)
    padded = max(2, triton.next_power_of_2(parts))
    _score_row[(rows,)](*found, chosen, logprobs, entropies, parts, PADDED=padded, NOTHING=NO_TOKEN, num_warps=1)
    return chosen, logprobs, entropies


@triton.jit(do_not_specialize=["banned"])
def _score_part(
    logits, best, ids, peaks, sums, moments, vocabulary, row, parts, banned, SIZE: tl.constexpr
):  # fmt: skip
    """+inf stands for a part with a logit that is not finite: no finite logit reaches it."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_inside = c < vocabulary
    x = tl.load(logits + r * row + c, mask=is_inside, other=float("-inf"))
    num_bad = tl.sum((is_inside & ~(tl.abs(x) < float("inf"))).to(tl.int32))
    peak = tl.max(x)
    below = x.to(tl.float64) - peak.to(tl.float64)
    weights = tl.where(is_inside, tl.exp(below), 0.0)
    moment = tl.sum(tl.where(is_inside, weights * below, 0.0))  # nats below the peak, weighted
    allowed = tl.where(c == banned, float("-inf"), x)
    top = tl.max(allowed)
    at = tl.min(tl.where((allowed == top) & is_inside & (c != banned), c, 2147483647))
    place = r * parts + tl.program_id(1)
    tl.store(best + place, tl.where(num_bad > 0, float("inf"), top))
    tl.store(ids + place, at)
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(weights))
    tl.store(moments + place, moment)


@triton.jit
def _score_row(
    best, ids, peaks, sums, moments, chosen, logprobs, entropies, parts, PADDED: tl.constexpr, NOTHING: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    is_part = c < parts
    place = r * parts + c
    x = tl.load(best + place, mask=is_part, other=float("-inf"))
    i = tl.load(ids + place, mask=is_part, other=2147483647)
    top = tl.max(x)
    at = tl.min(tl.where(x == top, i, 2147483647))
    peaks_of = tl.load(peaks + place, mask=is_part, other=float("-inf")).to(tl.float64)
    peak = tl.max(peaks_of)
    below = tl.where(is_part, peaks_of - peak, 0.0)
    scale = tl.where(is_part, tl.exp(below), 0.0)
    sums_of = tl.load(sums + place, mask=is_part, other=0.0)
    total = tl.sum(sums_of * scale)
    moment = tl.sum(scale * (tl.load(moments + place, mask=is_part, other=0.0) + below * sums_of))
    log_total = tl.log(total)
    is_broken = top == float("inf")
    logprob = top.to(tl.float64) - peak - log_total
    tl.store(chosen + r, tl.where(is_broken, NOTHING, at))
    tl.store(logprobs + r, tl.where(is_broken, 0.0, logprob).to(tl.float32))
    tl.store(entropies + r, tl.where(is_broken, 0.0, log_total - moment / total).to(tl.float32))
