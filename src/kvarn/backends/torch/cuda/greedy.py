"""The most probable token of every row: ties to the lower id, NO_TOKEN where a logit is not finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN
from kvarn.backends.torch.cuda.dependent import LAUNCH, wait_for_inputs

COLUMNS = 4096  # of one program


def most_probable(logits: Tensor) -> Tensor:
    """(rows) int32 of logits (rows, vocabulary) float32."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, COLUMNS)
    best = torch.empty(rows, parts, device=logits.device, dtype=torch.float32)
    ids = torch.empty(rows, parts, device=logits.device, dtype=torch.int32)
    chosen = torch.empty(rows, device=logits.device, dtype=torch.int32)
    _best_of_part[(rows, parts)](
        logits, best, ids, vocabulary, logits.stride(0), parts, SIZE=COLUMNS, num_warps=8, **LAUNCH
    )
    padded = triton.next_power_of_2(parts)
    _best_of_row[(rows,)](best, ids, chosen, parts, PADDED=padded, NOTHING=NO_TOKEN, num_warps=4, **LAUNCH)
    return chosen


@triton.jit
def _best_of_part(logits, best, ids, vocabulary, row, parts, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    """+inf stands for a part with a logit that is not finite: no finite logit reaches it."""
    wait_for_inputs(DEPENDENT)
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + r * row + c, mask=c < vocabulary, other=float("-inf"))
    is_bad = (c < vocabulary) & ~(tl.abs(x) < float("inf"))
    x = tl.where(is_bad, float("inf"), x)
    top = tl.max(x)
    at = tl.min(tl.where(x == top, c, 2147483647))
    tl.store(best + r * parts + tl.program_id(1), top)
    tl.store(ids + r * parts + tl.program_id(1), at)


@triton.jit
def _best_of_row(best, ids, chosen, parts, PADDED: tl.constexpr, NOTHING: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    x = tl.load(best + r * parts + c, mask=c < parts, other=float("-inf"))
    i = tl.load(ids + r * parts + c, mask=c < parts, other=2147483647)
    top = tl.max(x)
    at = tl.min(tl.where(x == top, i, 2147483647))
    tl.store(chosen + r, tl.where(top == float("inf"), NOTHING, at))
