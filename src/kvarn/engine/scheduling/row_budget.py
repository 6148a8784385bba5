"""Rows of a step for spans that cannot be divided.

The least recently served request is asked first, so a span that finds too few rows left fits into the next step. One
that is larger than a whole step saves up rows: half of each step's, and those that others leave unused. A span that
would be alone never waits.
"""

from __future__ import annotations

from kvarn.request import Request


class RowBudget:
    """open(), then offer() and spend() for one request after the other, then close()."""

    def __init__(self, max_rows: int) -> None:
        self.first_refused: Request | None = None  # in this step
        self._max_rows = max_rows
        self._left = 0
        self._saved = 0  # from steps before, for a span that is larger than a step
        self._wanted = 0  # rows of that span

    @property
    def has_rows(self) -> bool:
        return self._left > 0

    def open(self) -> None:
        self.first_refused = None
        self._left, self._wanted = self._max_rows, 0

    def offer(self, request: Request, least_rows: int) -> int:
        """Rows that a span of at least least_rows may have; 0: not in this step."""
        if least_rows <= self._left:
            return self._left
        if least_rows > self._max_rows:
            if least_rows <= self._left + self._saved and self._wanted == 0:
                self._saved -= least_rows - self._left
                self._left = least_rows
                return least_rows
            self._save_for(least_rows)
        if self.first_refused is None:
            self.first_refused = request
        return 0

    def spend(self, num_rows: int) -> None:
        self._left -= num_rows

    def close(self) -> None:
        """Carry over what is left, if a span saves up."""
        self._saved = min(self._saved + self._left, self._wanted) if self._wanted else 0

    def _save_for(self, num_rows: int) -> None:
        if self._wanted == 0:
            half = self._left // 2
            self._saved, self._left = self._saved + half, self._left - half
        self._wanted = max(self._wanted, num_rows)
