"""What a denoising step asks of its rows: the most probable token but the mask token, how probable, and the entropy.

Greedy rows without biases of their own are answered here, many at once and without a copy of the logits; all others go
through sampling.py, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN, RowSampling, SampleRows
from kvarn.backends.torch.device import on_device
from kvarn.backends.torch.elementwise import exp
from kvarn.backends.torch.logit_changes import has_penalty
from kvarn.backends.torch.sampling import LOGIT_ROWS, Drawn, first_largest, log_softmax, scan
from kvarn.sampling.sampler import BANNED

CONFIDENT_ROWS = 256  # rows x vocabulary never exists as one array beyond this

MostConfident = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]  # logits, banned id -> as most_confident() below


@dataclass(frozen=True, slots=True)
class Confident:
    """The most probable tokens of some rows, on the device."""

    token_ids: Tensor  # (rows) int32, NO_TOKEN where a logit is not finite
    logprobs: Tensor  # (rows) float32
    entropy: Tensor  # (rows) float32

    def first(self, count: int) -> Confident:
        """Of the first rows."""
        return Confident(self.token_ids[:count], self.logprobs[:count], self.entropy[:count])

    def drawn(self, rows: SampleRows) -> Drawn:
        """Those that are asked for, of the output rows of a step."""
        found, count = (self.token_ids, self.logprobs, self.entropy), len(rows.rows)
        if count != len(self.token_ids) or not (rows.rows == np.arange(count)).all():
            wanted = on_device(rows.rows.astype(np.int64), self.token_ids.device)
            found = (self.token_ids[wanted], self.logprobs[wanted], self.entropy[wanted])
        token_ids, logprobs, entropy = found
        return Drawn(token_ids, None, (logprobs, entropy, token_ids.new_empty(count, 0), logprobs.new_empty(count, 0)))


def asks_for_confidence(rows: SampleRows, mask_id: int) -> bool:
    """Whether the most probable token but mask_id and its statistics are all that any row asks for."""
    if not rows.want_logprobs or rows.num_top or rows.partners is not None or rows.unused_mask is not None:
        return False
    return len(rows.rows) > 0 and all(_is_plain(row, mask_id) for row in rows.params)


def confident_rows(
    logits_of: Callable[[slice], Tensor], num_rows: int, best_of: MostConfident, mask_id: int
) -> Confident:
    """Answer for the first rows, CONFIDENT_ROWS at a time; logits_of takes a slice of them."""
    starts = range(0, num_rows, CONFIDENT_ROWS)
    parts = [best_of(logits_of(slice(first, first + CONFIDENT_ROWS)), mask_id) for first in starts]
    return Confident(*parts[0]) if len(parts) == 1 else Confident(*map(torch.cat, zip(*parts, strict=True)))


def most_confident(logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities among all tokens, and entropies; cuda/confidence.py has the same as kernels."""
    if len(logits) > LOGIT_ROWS:  # float64 is twice as large
        parts = [most_confident(part, banned) for part in torch.split(logits, LOGIT_ROWS)]
        ids, logprobs, entropy = map(torch.cat, zip(*parts, strict=True))
        return ids, logprobs, entropy
    is_finite = torch.isfinite(logits).all(dim=-1)
    others = logits.clone()
    others[:, banned] = -torch.inf
    ids = first_largest(others)
    logprobs = log_softmax(logits)
    entropy = -scan(exp(logprobs) * logprobs)[:, -1]
    scores = [values.float().masked_fill(~is_finite, 0) for values in (logprobs.gather(1, ids[:, None])[:, 0], entropy)]
    return torch.where(is_finite, ids, NO_TOKEN).to(torch.int32), scores[0], scores[1]


def _is_plain(row: RowSampling, mask_id: int) -> bool:
    """Greedy, and nothing changes its logits but the ban of mask_id."""
    if row.temperature != 0.0 or row.mask is not None or len(row.bias_ids) != 1 or has_penalty(row):
        return False
    return bool(row.bias_ids[0] == mask_id and row.bias_values[0] <= BANNED)
