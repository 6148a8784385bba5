"""How long an answer without max_tokens will be, going by the last ones: what is reserved for it.

The context, or the whole window of a limit, would be a safe bound, and would refuse everybody else meanwhile.
"""

from __future__ import annotations

MIN_TOKENS = 512  # longer than most answers of a chat
DECAY = 0.25  # of the distance to a shorter answer


class ExpectedAnswer:
    """Rises at once to a longer answer and falls slowly after shorter ones, so that few exceed it."""

    __slots__ = ("_num_tokens",)

    def __init__(self) -> None:
        self._num_tokens = float(MIN_TOKENS)

    def within(self, longest: int) -> int:
        """The tokens to reserve for an answer that cannot get longer than this."""
        return min(longest, round(self._num_tokens))

    def observe(self, num_tokens: float) -> None:
        """An answer without max_tokens has ended."""
        fallen = self._num_tokens + DECAY * (num_tokens - self._num_tokens)
        self._num_tokens = max(num_tokens, fallen, MIN_TOKENS)
