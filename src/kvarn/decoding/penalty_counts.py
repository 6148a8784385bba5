"""Token counts for the penalties of one request, updated token by token, so that a step needs no recount."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from kvarn.backends.batch import Int32


class PenaltyCounts:
    """Distinct tokens of prompt and output, with the count of each in the output; of the last `window` tokens only.

    Slots hold one token each, in no order: a token that leaves the window is replaced by the last one.
    """

    def __init__(self, prompt_ids: Sequence[int], window: int | None = None) -> None:
        self._num_prompt = len(prompt_ids)
        self._window = window
        self._first = self._num_read = 0 if window is None else max(0, len(prompt_ids) - window)
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(256, np.int32)
        self._output_counts = np.zeros(256, np.int32)
        self._window_counts: list[int] = []  # of prompt and output in the window, by slot
        self.update(prompt_ids)

    def fork(self) -> PenaltyCounts:
        """A copy that may read on by itself."""
        other = copy(self)
        other._slots, other._window_counts = dict(self._slots), list(self._window_counts)
        other._ids, other._output_counts = self._ids.copy(), self._output_counts.copy()
        return other

    @property
    def ids(self) -> Int32:
        return self._ids[: len(self._slots)].copy()

    @property
    def counts(self) -> Int32:
        return self._output_counts[: len(self._slots)].copy()

    def update(self, token_ids: Sequence[int]) -> None:
        """Read the tokens that came since the last call; token_ids has all of the request's."""
        for position in range(self._num_read, len(token_ids)):
            self._add(token_ids[position], position >= self._num_prompt)
        self._num_read = len(token_ids)
        if self._window is not None:
            while self._first < len(token_ids) - self._window:
                self._remove(token_ids[self._first], self._first >= self._num_prompt)
                self._first += 1

    def _add(self, token_id: int, is_output: bool) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            self._window_counts.append(0)
            if slot == len(self._ids):
                self._ids, self._output_counts = (
                    np.resize(self._ids, 2 * slot),
                    np.resize(self._output_counts, 2 * slot),
                )
            self._ids[slot] = token_id
            self._output_counts[slot] = 0
        self._window_counts[slot] += 1
        self._output_counts[slot] += is_output

    def _remove(self, token_id: int, is_output: bool) -> None:
        slot = self._slots[token_id]
        self._window_counts[slot] -= 1
        self._output_counts[slot] -= is_output
        if self._window_counts[slot]:
            return
        last = len(self._slots) - 1
        last_id = int(self._ids[last])
        self._ids[slot], self._output_counts[slot] = last_id, self._output_counts[last]
        self._window_counts[slot] = self._window_counts[last]
        self._slots[last_id] = slot
        self._window_counts.pop()
        del self._slots[token_id]
