"""Sampling state of one request, kept from step to step: parameters, biases, counts, grammar. Never sees logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.backends.batch import Float32, Int32, RowSampling
from kvarn.decoding.penalty_counts import PenaltyCounts
from kvarn.errors import ConstraintError
from kvarn.request import Request
from kvarn.sampling.dry import Breakers, Dry, RepeatedRuns
from kvarn.sampling.sampler import BANNED
from kvarn.types import SamplingParams

Encode = Callable[[str], Sequence[int]]
_PLAIN_ROW = RowSampling()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for None in SamplingParams, where the model's metadata recommends no others."""

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class SamplingState:
    """Parameters with the model's recommendations filled in, biases, and counts of the tokens so far.

    What does not change from token to token is computed once: a step copies it and sets the position.
    """

    def __init__(
        self, request: Request, defaults: SamplingDefaults, eos_ids: tuple[int, ...], breakers: Breakers = ()
    ) -> None:
        params = request.params
        static = resolve(params, defaults) | {"seed": request.seed % 2**64, "choice": request.choice}
        stop_ids = (() if params.ignore_eos else eos_ids) + params.stop_token_ids
        self._row = biased_row(static, dict(params.logit_bias))
        bias_below = dict(params.logit_bias) | dict.fromkeys(stop_ids, BANNED)
        self._row_below_min_tokens = biased_row(static, bias_below) if params.min_tokens else self._row
        self._penalty_counts = (
            PenaltyCounts(request.prompt_ids, params.penalty_window) if _has_penalties(self._row) else None
        )
        self._dry = DryBias(request, breakers) if params.dry_multiplier > 0 else None
        self._matcher = None if request.constraint is None else request.constraint.matcher()
        # No choice depends on the tokens before it:
        self.is_static = self._penalty_counts is None and self._dry is None and self._matcher is None

    def row(self, request: Request, position: int) -> RowSampling:
        """Everything that sampling the token at a position depends on; all before it are known, or is_static."""
        is_early = position - request.num_prompt < request.params.min_tokens
        row = self._row_below_min_tokens if is_early else self._row
        if self.is_static:
            return row if row.temperature == 0.0 else row.at(position)  # nothing is drawn where it is 0
        return row.at(position, **self._changes(row, request.token_ids, request.num_prompt))

    def rows(self, request: Request, drafts: Sequence[int]) -> list[RowSampling]:
        """row() of the next token, and of those after each of the drafts, as if they had been chosen."""
        first, num_tokens = self.row(request, len(request.token_ids)), len(request.token_ids)
        if self.is_static:
            return [first, *[self.row(request, num_tokens + count) for count in range(1, len(drafts) + 1)]]
        found, probe, token_ids = [first], self._fork(), list(request.token_ids)
        for position, token_id in enumerate(drafts, num_tokens + 1):
            token_ids.append(token_id)
            is_early = position - request.num_prompt < request.params.min_tokens
            row = self._row_below_min_tokens if is_early else self._row
            found.append(row.at(position, **probe._changes(row, token_ids, request.num_prompt)))
        return found

    def num_valid(self, request: Request, drafts: Sequence[int]) -> int:
        """How many of the drafts the answer's constraint takes."""
        if self._matcher is None or not drafts:
            return len(drafts)
        return self._matcher.num_valid(request.token_ids, request.num_prompt, drafts)

    def forced(self, request: Request) -> list[int]:
        """The next tokens, where the answer's constraint leaves no choice."""
        return [] if self._matcher is None else self._matcher.forced(request.token_ids, request.num_prompt)

    def _changes(self, row: RowSampling, token_ids: Sequence[int], num_prompt: int) -> dict[str, Any]:
        """Fields of a row that depend on the tokens before it."""
        changes: dict[str, Any] = {}
        if self._penalty_counts is not None:
            self._penalty_counts.update(token_ids)
            changes = {"seen_ids": self._penalty_counts.ids, "seen_counts": self._penalty_counts.counts}
        if self._dry is not None:
            changes |= self._dry.changes(row, token_ids)
        if self._matcher is not None:
            changes["mask"] = self._matcher.mask_after(token_ids, num_prompt)  # None: all may follow
        return changes

    def _fork(self) -> SamplingState:
        """A state of its own at the same token, which may read drafts."""
        other = copy(self)
        other._penalty_counts = None if self._penalty_counts is None else self._penalty_counts.fork()
        other._dry = None if self._dry is None else self._dry.fork()
        other._matcher = None if self._matcher is None else self._matcher.fork()
        return other

    @property
    def error(self) -> ConstraintError | None:
        """Why no token can be sampled: the constraint came to a dead end."""
        return None if self._matcher is None else self._matcher.error

    def accept_token(self, token_id: int) -> bool:
        """Take the token sampled from row(); whether the answer's constraint is satisfied and nothing may follow."""
        return self._matcher is not None and self._matcher.accept_token(token_id)


class DryBias:
    """The DRY penalties of one request, as entries of its bias."""

    def __init__(self, request: Request, breakers: Breakers) -> None:
        params = request.params
        self._params = Dry(params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.penalty_window)
        self._runs = RepeatedRuns(request.token_ids, breakers)

    def fork(self) -> DryBias:
        other = copy(self)
        other._runs = self._runs.fork()
        return other

    def changes(self, row: RowSampling, token_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of the row with the penalties of the tokens before it added."""
        for token_id in token_ids[self._runs.num_tokens :]:
            self._runs.append(token_id)
        ids, values = self._runs.penalties(self._params)
        if not len(ids):
            return {}
        return {
            "bias_ids": np.concatenate([row.bias_ids, ids]),
            "bias_values": np.concatenate([row.bias_values, values]),
        }


def breaker_tokens(encode: Encode, texts: Sequence[str]) -> Breakers:
    """The tokens of each breaker, at the start of a text and after a word: some tokenisers tell them apart."""
    word = list(encode("a"))
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        after_word = list(encode("a" + text))
        found[tuple(encode(text))] = None
        if after_word[: len(word)] == word:
            found[tuple(after_word[len(word) :])] = None
    return tuple(sequence for sequence in found if sequence)


def resolve(params: SamplingParams, defaults: SamplingDefaults) -> dict[str, Any]:
    """Fill in what the caller left open."""
    return {
        "temperature": _first(params.temperature, defaults.temperature),
        "top_k": _first(params.top_k, defaults.top_k),
        "top_p": _first(params.top_p, defaults.top_p),
        "min_p": _first(params.min_p, defaults.min_p),
        "typical_p": params.typical_p,
        "repetition_penalty": _first(params.repetition_penalty, defaults.repetition_penalty),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
    }


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _has_penalties(row: RowSampling) -> bool:
    return bool(row.repetition_penalty != 1.0 or row.presence_penalty or row.frequency_penalty)


def biased_row(static: dict[str, Any], bias: dict[int, float]) -> RowSampling:
    """A row of parameters that stay the same and a bias by token id."""
    if not bias:
        return _PLAIN_ROW.at(0, **static)
    return _PLAIN_ROW.at(0, **static, bias_ids=_ids(sorted(bias)), bias_values=_values([bias[i] for i in sorted(bias)]))


def _ids(ids: list[int]) -> Int32:
    return np.array(ids, np.int32)


def _values(values: list[float]) -> Float32:
    return np.array(values, np.float32)
