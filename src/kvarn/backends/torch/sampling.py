"""Sampling on the device: the choice that kvarn.sampling defines, for many rows at once.

Sums run through a parallel scan in float64, so a random number within about 1e-13 of the border between two tokens may
fall to the other side than on the host. A row's own scan does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN, RowSampling, Sampled, SampleRows, Scored
from kvarn.backends.torch.candidates import choose_candidates
from kvarn.backends.torch.logit_changes import change_logits, is_changed

LOGIT_ROWS = 64  # rows x vocabulary never exists as one array beyond this

Arrays = tuple[npt.NDArray[Any], ...]
LogitsOf = Callable[[Tensor], Tensor]  # output rows -> (rows, vocabulary), float32


def sample_rows(logits_of: LogitsOf, rows: SampleRows, device: torch.device) -> Sampled:
    """Choose one token for each row."""
    starts = range(0, len(rows.rows), LOGIT_ROWS)
    parts = [_sample_some(logits_of, rows, slice(start, start + LOGIT_ROWS), device) for start in starts]
    return Sampled(*(np.concatenate(arrays) for arrays in zip(_nothing(rows.num_top), *parts, strict=True)))


def is_greedy(rows: SampleRows) -> bool:
    """Whether the largest logit of every row is all that is asked for."""
    if rows.want_logprobs or rows.num_top or rows.partners is not None:
        return False
    return all(row.temperature == 0.0 and not is_changed(row) for row in rows.params)


def chosen(token_ids: npt.NDArray[np.int32]) -> Sampled:
    """Tokens without anything beside them."""
    return Sampled(token_ids, *_nothing(0, len(token_ids))[1:])


def score_rows(logits_of: LogitsOf, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
    """Log-probabilities of one given token for each of the output rows."""
    parts: list[Arrays] = [_nothing(num_top)[2:]]
    for start in range(0, len(targets), LOGIT_ROWS):
        some = torch.arange(start, min(start + LOGIT_ROWS, len(targets)))
        logits = logits_of(some)
        parts.append(_scores(log_softmax(logits), torch.from_numpy(targets)[some].to(logits.device), num_top))
    return Scored(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in float64."""
    exact = logits.double()
    exact = exact - exact.amax(dim=-1, keepdim=True)
    return exact - torch.log(scan(torch.exp(exact))[:, -1:])


def scan(values: Tensor) -> Tensor:
    """Running sums of each row. One row alone would be added up by another algorithm, so it gets company."""
    return torch.cumsum(values.expand(2, -1) if len(values) == 1 else values, dim=-1)[: len(values)]


def _sample_some(logits_of: LogitsOf, rows: SampleRows, some: slice, device: torch.device) -> Arrays:
    params, logits = rows.params[some], _guided_logits(logits_of, rows, some, device)
    is_finite = torch.isfinite(logits).all(dim=-1)
    chosen = torch.where(is_finite, _choose(logits, params), NO_TOKEN)
    if not rows.want_logprobs:
        empty = _nothing(rows.num_top, len(params))
        return chosen.to(torch.int32).cpu().numpy(), *empty[1:]
    logprobs = log_softmax(logits)
    entropy = -scan(torch.exp(logprobs) * logprobs)[:, -1]
    is_chosen = chosen != NO_TOKEN
    found, top_ids, top_logprobs = _scores(logprobs, chosen.clamp(min=0), rows.num_top)
    arrays = (found, entropy.float().cpu().numpy(), top_ids, top_logprobs)
    for values in arrays:
        values[~is_chosen.cpu().numpy()] = 0
    return chosen.to(torch.int32).cpu().numpy(), *arrays


def _choose(logits: Tensor, params: Sequence[RowSampling]) -> Tensor:
    """A token for each row; NO_TOKEN where its mask allows none."""
    if any(is_changed(row) for row in params):
        logits = change_logits(logits, params)
    greedy = first_largest(logits)
    sampled = [i for i, row in enumerate(params) if row.temperature != 0.0]
    if sampled:
        some = torch.tensor(sampled, device=logits.device)
        found, is_sampled = choose_candidates(logits[some], [params[i] for i in sampled], scan)
        greedy[some] = torch.where(is_sampled, found, greedy[some])
    blocked = [row.mask is not None and not row.mask.any() for row in params]
    return greedy.masked_fill(torch.tensor(blocked, device=logits.device), NO_TOKEN) if any(blocked) else greedy


def first_largest(logits: Tensor) -> Tensor:
    """The largest of each row, ties to the lower id, as torch promises of argmax."""
    return torch.argmax(logits, dim=-1)


def _guided_logits(logits_of: LogitsOf, rows: SampleRows, some: slice, device: torch.device) -> Tensor:
    """Logits of some rows, guided away from their partners' where they have one."""
    logits = logits_of(torch.from_numpy(rows.rows[some].astype(np.int64)).to(device))
    if rows.partners is None or not (rows.partners[some] >= 0).any():
        return logits
    guided = np.flatnonzero(rows.partners[some] >= 0)
    partners = torch.from_numpy(rows.partners[some][guided].astype(np.int64)).to(device)
    scales = torch.tensor([rows.params[some][i].cfg_scale + 1 for i in guided], dtype=torch.float32, device=device)
    at, unconditional = torch.from_numpy(guided).to(device), logits_of(partners)
    logits[at] = unconditional + scales[:, None] * (logits[at] - unconditional)
    return logits


def _scores(logprobs: Tensor, tokens: Tensor, num_top: int) -> Arrays:
    chosen = logprobs.gather(1, tokens.long()[:, None])[:, 0].float().cpu().numpy()
    if num_top == 0:
        return chosen, np.zeros((len(tokens), 0), np.int32), np.zeros((len(tokens), 0), np.float32)
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return chosen, ids[:, :num_top].to(torch.int32).cpu().numpy(), values[:, :num_top].float().cpu().numpy()


def _nothing(num_top: int, count: int = 0) -> Arrays:
    shape = (count, num_top)
    floats = np.zeros(count, np.float32)
    return np.zeros(count, np.int32), floats, floats.copy(), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
