"""The position of one answer in its grammar: which tokens may follow. One thread at a time; knows no logits.

The position is a function of the answer's tokens alone, so preemption, retries and batch composition do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvarn.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher

NOTHING_MAY_FOLLOW = "NoExtensionBias"  # llguidance's error

UInt32 = npt.NDArray[np.uint32]


class GrammarMatcher:
    """Follows the tokens of one answer; start is a matcher behind its first num_accepted tokens, which stays there.

    allowed: the ids that tokens have. A grammar may name any other by its number.
    """

    def __init__(self, start: LLMatcher, allowed: UInt32, num_accepted: int = 0) -> None:
        self._start = start
        self._allowed = allowed
        self._matcher = start.deep_copy()
        self._num_accepted = num_accepted
        self.error: ConstraintError | None = None  # why nothing may follow

    def mask_after(self, token_ids: Sequence[int], num_prompt: int) -> UInt32:
        """One bit per token that may follow token_ids; no bit at a dead end, and then error says why."""
        self._advance_to(token_ids, num_prompt)
        mask = None if self.error is not None else allowed_mask(self._matcher, self._allowed)
        if mask is None:
            if self.error is None:
                self._fail()
            return np.zeros_like(self._allowed)
        return mask

    def accept_token(self, token_id: int) -> bool:
        """Take a sampled token; whether the answer is complete with it and nothing more may follow."""
        self._num_accepted += 1
        if not self._matcher.consume_token(token_id):
            self._fail()
            return False
        return self._matcher.is_stopped()

    def fork(self) -> GrammarMatcher:
        """A matcher of its own at the same token."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def num_valid(self, token_ids: Sequence[int], num_prompt: int, drafts: Sequence[int]) -> int:
        """How many of the drafts may follow token_ids, one after the other."""
        self._advance_to(token_ids, num_prompt)
        if self.error is not None or self._matcher.is_stopped():
            return 0
        return max(0, self._matcher.validate_tokens(list(drafts)))

    def forced(self, token_ids: Sequence[int], num_prompt: int) -> list[int]:
        """The tokens after token_ids that have no alternative."""
        self._advance_to(token_ids, num_prompt)
        if self.error is not None or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def _advance_to(self, token_ids: Sequence[int], num_prompt: int) -> None:
        if self._num_accepted > len(token_ids) - num_prompt:  # a step was undone: start again
            self._matcher, self._num_accepted, self.error = self._start.deep_copy(), 0, None
        for token_id in token_ids[num_prompt + self._num_accepted :]:
            self.accept_token(token_id)

    def _fail(self) -> None:
        reason = explain(self._matcher.get_error())
        if not reason or reason == NOTHING_MAY_FOLLOW:
            reason = "no token of the vocabulary may follow"
        self.error = ConstraintError(
            f"the answer came to a dead end of its constraint after {self._num_accepted:,} tokens: {reason}; "
            "simplify the constraint"
        )


def allowed_mask(matcher: LLMatcher, allowed: UInt32) -> UInt32 | None:
    """One bit per token of those allowed that may follow; None: nothing may, or the matcher failed."""
    mask = np.zeros_like(allowed)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    mask &= allowed
    # A failed matcher allows the end of the text, whatever the grammar says: look at its error first.
    return None if matcher.is_error() or not mask.any() else mask


def explain(error: str) -> str:
    """One line of llguidance's message: the one that begins with "error:", else the first."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and "<non-verbose/>" not in line]
    text = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "".join(lines[:1]))
    return text if len(text) <= 200 else text[:197] + "..."
