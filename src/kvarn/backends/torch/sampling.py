"""Sampling on the device: the choice that kvarn.sampling defines, for many rows at once.

Sums run through a parallel scan in float64, so a random number within about 1e-13 of the border between two tokens may
fall to the other side than on the host. A row's own scan does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import NO_TOKEN, RowSampling, Sampled, SampleRows, Scored
from kvarn.backends.torch.candidates import choose_candidates
from kvarn.backends.torch.device import computing, on_device
from kvarn.backends.torch.elementwise import exp
from kvarn.backends.torch.logit_changes import change_logits, is_changed

LOGIT_ROWS = 64  # rows x vocabulary never exists as one array beyond this

Arrays = tuple[npt.NDArray[Any], ...]
LogitsOf = Callable[[Tensor], Tensor]  # output rows -> (rows, vocabulary), float32


@dataclass(frozen=True, slots=True)
class Drawn:
    """The choices of some rows, on the device."""

    token_ids: Tensor  # (rows) int32
    is_settled: Tensor | None = None  # (rows) bool: False where only the whole vocabulary can tell; None: all are
    scores: tuple[Tensor, ...] = ()  # what follows token_ids in Sampled, where log-probabilities are wanted


def sample_rows(logits_of: LogitsOf, rows: SampleRows, device: torch.device) -> Sampled:
    """Choose one token for each row."""
    return PendingSample(draw_rows(logits_of, rows, device), logits_of, rows, device).read()


def draw_rows(logits_of: LogitsOf, rows: SampleRows, device: torch.device, *, whole: bool = False) -> Drawn:
    """Begin to choose one token for each row; whole: settle all of them, however long that takes."""
    starts = range(0, len(rows.rows), LOGIT_ROWS)
    parts = [_draw_some(logits_of, rows, slice(start, start + LOGIT_ROWS), device, whole) for start in starts]
    if not parts:
        return Drawn(torch.empty(0, dtype=torch.int32, device=device))
    settled = [part.is_settled for part in parts if part.is_settled is not None]
    scores = zip(*(part.scores for part in parts), strict=True)
    return Drawn(
        torch.cat([part.token_ids for part in parts]),
        torch.cat(settled),
        tuple([torch.cat(column) for column in scores]),
    )


class PendingSample:
    """Choices on their way to the host."""

    def __init__(self, drawn: Drawn, logits_of: LogitsOf, rows: SampleRows, device: torch.device) -> None:
        """logits_of: asked again for rows that are not settled, when the others are read."""
        self._logits_of, self._rows, self._device = logits_of, rows, device
        self._token_ids = _begin_copy(drawn.token_ids)
        self._is_settled = None if drawn.is_settled is None else _begin_copy(drawn.is_settled)
        self._scores = [_begin_copy(score) for score in drawn.scores]
        self._copied: torch.Event | None = None
        if device.type == "cuda":
            self._copied = torch.Event(device)
            self._copied.record()

    @computing
    def read(self) -> Sampled:
        """Wait for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, scores = self._token_ids.numpy(), [score.numpy() for score in self._scores]
        late = () if self._is_settled is None else tuple((~self._is_settled).nonzero()[:, 0].tolist())
        if late:
            settled = self._redraw(list(late))
            for mine, theirs in zip((token_ids, *scores), (settled.token_ids, *settled.scores), strict=True):
                mine[list(late)] = theirs.cpu().numpy()
        found, entropy, top_ids, top_logprobs = scores or _no_scores(self._rows.num_top, len(token_ids))
        return Sampled(token_ids, found, entropy, top_ids, top_logprobs, late=late)

    def _redraw(self, late: list[int]) -> Drawn:
        rows = self._rows
        partners = None if rows.partners is None else rows.partners[late]
        params = tuple([rows.params[i] for i in late])
        again = replace(rows, rows=rows.rows[late], params=params, partners=partners).with_unused_masked()
        return draw_rows(self._logits_of, again, self._device, whole=True)


def _begin_copy(values: Tensor) -> Tensor:
    """To the host, without waiting."""
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def is_greedy(rows: SampleRows) -> bool:
    """Whether the largest logit of every row is all that is asked for."""
    if rows.want_logprobs or rows.num_top or rows.partners is not None:
        return False
    return all(row.temperature == 0.0 and not is_changed(row) for row in rows.params)


def score_rows(logits_of: LogitsOf, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
    """Log-probabilities of one given token for each of the output rows."""
    parts: list[Arrays] = [(np.empty(0, np.float32), *_no_scores(num_top, 0)[2:])]
    for start in range(0, len(targets), LOGIT_ROWS):
        some = torch.arange(start, min(start + LOGIT_ROWS, len(targets)))
        logits = logits_of(some)
        scores = _scores(log_softmax(logits), torch.from_numpy(targets)[some].to(logits.device), num_top)
        parts.append(tuple([score.cpu().numpy() for score in scores]))
    return Scored(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in float64."""
    exact = logits.double()
    exact = exact - exact.amax(dim=-1, keepdim=True)
    return exact - torch.log(scan(exp(exact))[:, -1:])


def scan(values: Tensor) -> Tensor:
    """Running sums of each row. One row alone would be added up by another algorithm, so it gets company."""
    return torch.cumsum(values.expand(2, -1) if len(values) == 1 else values, dim=-1)[: len(values)]


def _draw_some(logits_of: LogitsOf, rows: SampleRows, some: slice, device: torch.device, whole: bool) -> Drawn:
    params, logits = rows.params[some], _guided_logits(logits_of, rows, some, device)
    is_finite = torch.isfinite(logits).all(dim=-1)
    token_ids, is_settled = _choose(logits, params, whole)
    chosen = torch.where(is_finite, token_ids, NO_TOKEN)
    is_settled = is_settled | ~is_finite
    if not rows.want_logprobs:
        return Drawn(chosen.to(torch.int32), is_settled)
    logprobs = log_softmax(logits)
    entropy = -scan(exp(logprobs) * logprobs)[:, -1]
    found, top_ids, top_logprobs = _scores(logprobs, chosen.clamp(min=0), rows.num_top)
    is_none = chosen == NO_TOKEN
    by_row = [values.masked_fill(is_none, 0) for values in (found, entropy.float())]
    by_top = [values.masked_fill(is_none[:, None], 0) for values in (top_ids, top_logprobs)]
    return Drawn(chosen.to(torch.int32), is_settled, (*by_row, *by_top))


def _choose(logits: Tensor, params: Sequence[RowSampling], whole: bool) -> tuple[Tensor, Tensor]:
    """A token for each row, NO_TOKEN where its mask allows none; and which are settled."""
    if any(is_changed(row) for row in params):
        logits = change_logits(logits, params)
    greedy = first_largest(logits)
    is_settled = torch.ones_like(greedy, dtype=torch.bool)
    sampled = [i for i, row in enumerate(params) if row.temperature != 0.0]
    if sampled:
        some = on_device(sampled, logits.device)
        choice = choose_candidates(logits[some], [params[i] for i in sampled], scan, whole=whole)
        greedy[some] = torch.where(choice.counts, choice.ids, greedy[some])
        is_settled[some] = choice.is_settled
    blocked = [row.mask is not None and not row.mask.any() for row in params]
    chosen = greedy.masked_fill(on_device(blocked, logits.device), NO_TOKEN) if any(blocked) else greedy
    return chosen, is_settled


def first_largest(logits: Tensor) -> Tensor:
    """The largest of each row, ties to the lower id, as torch promises of argmax."""
    return torch.argmax(logits, dim=-1)


def _guided_logits(logits_of: LogitsOf, rows: SampleRows, some: slice, device: torch.device) -> Tensor:
    """Logits of some rows, guided away from their partners' where they have one."""
    logits = logits_of(on_device(rows.rows[some].astype(np.int64), device))
    if rows.partners is None or not (rows.partners[some] >= 0).any():
        return logits
    guided = np.flatnonzero(rows.partners[some] >= 0)
    partners = on_device(rows.partners[some][guided].astype(np.int64), device)
    scales = on_device(np.array([rows.params[some][i].cfg_scale + 1 for i in guided], np.float32), device)
    at, unconditional = on_device(guided, device), logits_of(partners)
    logits[at] = unconditional + scales[:, None] * (logits[at] - unconditional)
    return logits


def _scores(logprobs: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of given tokens, and the most probable with theirs; float32 and int32."""
    chosen = logprobs.gather(1, tokens.long()[:, None])[:, 0].float()
    if num_top == 0:
        none = logprobs[:, :0]
        return chosen, none.to(torch.int32), none.float()
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return chosen, ids[:, :num_top].to(torch.int32), values[:, :num_top].float()


def _no_scores(num_top: int, count: int) -> Arrays:
    """What stands in a Sampled for scores that nobody wants."""
    shape, floats = (count, num_top), np.zeros(count, np.float32)
    return floats, floats.copy(), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
