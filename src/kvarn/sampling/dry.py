"""DRY, "don't repeat yourself": the longer the repeated run that a token would continue, the larger its penalty.

Of a text x of n tokens, whose last breaker sequence ends right before token b (0 without one), and a first token f
that the penalty window still covers:

    run(i)      = the longest k <= n - b, k <= i + 1 - f with x[i+1-k : i+1] == x[n-k : n]       f <= i < n - 1
    match(t)    = the largest run(i) with x[i+1] == t
    penalty(t)  = multiplier * base ** (match(t) - allowed_length), at most 1e9, where match(t) >= allowed_length

It is subtracted from the logit of t as a bias. Tokens that are breakers by themselves are exempt.

    x = the cat sat . the cat        run = 2 at the first "cat"  ->  "sat" is penalised
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Breakers = tuple[tuple[int, ...], ...]  # token sequences

MAX_PENALTY = 1e9  # finite, so that no inf - inf can arise
MIN_CAPACITY = 256
NO_IDS, NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Dry:
    """The parameters; window is that of all penalties."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int | None = None


class RepeatedRuns:
    """run(i) for every token of a growing text: O(n) when made, then one pass of NumPy for each token."""

    def __init__(self, token_ids: Sequence[int], breakers: Breakers = ()) -> None:
        self._breakers = breakers
        self._single_token_breakers = np.array([b[0] for b in breakers if len(b) == 1], np.int32)
        self.num_tokens = len(token_ids)
        capacity = max(MIN_CAPACITY, 2 * self.num_tokens)
        self._ids = np.zeros(capacity, np.int32)
        self._runs = np.zeros(capacity, np.int32)  # as run(i), but for breakers and window
        self._ids[: self.num_tokens] = token_ids
        self._runs[: max(self.num_tokens - 1, 0)] = _runs_of(list(token_ids))
        self._num_unbroken = _tokens_after_breakers(self._ids[: self.num_tokens], breakers)  # n - b

    def fork(self) -> RepeatedRuns:
        """A copy that may read on by itself."""
        other = copy(self)
        other._ids, other._runs = self._ids.copy(), self._runs.copy()
        return other

    def append(self, token_id: int) -> None:
        n = self.num_tokens
        if n == len(self._ids):
            self._ids, self._runs = (np.concatenate([part, np.zeros_like(part)]) for part in (self._ids, self._runs))
        if n:
            # A run goes on where the same token stands, and ends everywhere else.
            longer = self._runs[: n - 1] + 1
            is_same = self._ids[:n] == token_id
            np.multiply(longer, is_same[1:], out=self._runs[1:n])
            self._runs[0] = is_same[0]
        self._ids[n] = token_id
        self.num_tokens = n + 1
        self._num_unbroken = 0 if any(self._ends_with(b) for b in self._breakers) else self._num_unbroken + 1

    def penalties(self, dry: Dry) -> tuple[Int32, Float32]:
        first = 0 if dry.window is None else max(0, self.num_tokens - dry.window)
        at = (self._runs[first : max(self.num_tokens - 1, first)] >= dry.allowed_length).nonzero()[0]
        if not len(at) or self._num_unbroken < dry.allowed_length:
            return NO_IDS, NO_VALUES
        runs = np.minimum(self._runs[first + at], np.minimum(self._num_unbroken, at + 1))
        is_long = runs >= dry.allowed_length
        ids, which = np.unique(self._ids[first + at[is_long] + 1], return_inverse=True)
        matches = np.zeros(len(ids), np.int64)
        np.maximum.at(matches, which, runs[is_long])
        with np.errstate(over="ignore"):
            values = dry.multiplier * np.power(float(dry.base), matches - dry.allowed_length)
        is_exempt = np.isin(ids, self._single_token_breakers)
        return ids[~is_exempt], -np.minimum(values, MAX_PENALTY)[~is_exempt].astype(np.float32)

    def _ends_with(self, sequence: tuple[int, ...]) -> bool:
        n = self.num_tokens
        return len(sequence) <= n and tuple(self._ids[n - len(sequence) : n].tolist()) == sequence


def _runs_of(token_ids: list[int]) -> list[int]:
    """Common suffix of the text with itself up to each token but the last: the Z-function of the reversed text."""
    text = token_ids[::-1]
    n = len(text)
    z = [0] * n
    left = right = 0
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and text[length] == text[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z[:0:-1]


def _tokens_after_breakers(ids: Int32, breakers: Breakers) -> int:
    """How many tokens follow the last breaker; all where there is none."""
    end = 0
    for sequence in breakers:
        num_starts = len(ids) - len(sequence) + 1
        if num_starts < 1:
            continue
        is_start = np.ones(num_starts, bool)
        for offset, token_id in enumerate(sequence):
            is_start &= ids[offset : offset + num_starts] == token_id
        starts = np.flatnonzero(is_start)
        if len(starts):
            end = max(end, int(starts[-1]) + len(sequence))
    return len(ids) - end
