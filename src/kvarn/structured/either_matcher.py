"""Several constraints of which an answer follows any one: what each of them allows may follow, until it is left.

llguidance cannot tell two grammars in one apart that begin with the same characters; side by side they need not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvarn.errors import ConstraintError
from kvarn.structured.matcher import UInt32

if TYPE_CHECKING:
    from kvarn.structured.compiler import CompiledConstraint
    from kvarn.structured.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class EitherConstraint:
    """Compiled constraints for one vocabulary."""

    parts: tuple[CompiledConstraint, ...]

    def matcher(self) -> EitherMatcher:
        return EitherMatcher(self.parts)


class EitherMatcher:
    """Follows the tokens of one answer in all parts; a part that does not take a token is left for good."""

    def __init__(self, parts: Sequence[CompiledConstraint]) -> None:
        self._parts = parts
        self._alive: list[GrammarMatcher] = [part.matcher() for part in parts]
        self._num_accepted = 0
        self.error: ConstraintError | None = None  # why nothing may follow

    def mask_after(self, token_ids: Sequence[int], num_prompt: int) -> UInt32:
        """One bit per token that may follow; no bit at a dead end of all parts, and then error says why."""
        if self._num_accepted > len(token_ids) - num_prompt:  # a step was undone: start again
            self._alive, self._num_accepted, self.error = [part.matcher() for part in self._parts], 0, None
        for token_id in token_ids[num_prompt + self._num_accepted :]:
            self.accept_token(token_id)
        mask: UInt32 = np.bitwise_or.reduce([one.mask_after(token_ids, num_prompt) for one in self._alive])
        self._leave_failed()
        return mask

    def accept_token(self, token_id: int) -> bool:
        """Take a sampled token; whether the answer is complete with it and nothing more may follow."""
        self._num_accepted += 1
        are_complete = {one: one.accept_token(token_id) for one in self._alive}
        self._leave_failed()
        return all(are_complete[one] for one in self._alive) and self.error is None

    def fork(self) -> EitherMatcher:
        """A matcher of its own at the same token."""
        other = copy(self)
        other._alive = [one.fork() for one in self._alive]
        return other

    def num_valid(self, token_ids: Sequence[int], num_prompt: int, drafts: Sequence[int]) -> int:
        """How many of the drafts may follow token_ids, one after the other."""
        return max(one.num_valid(token_ids, num_prompt, drafts) for one in self._alive)

    def forced(self, token_ids: Sequence[int], num_prompt: int) -> list[int]:
        """The tokens after token_ids that have no alternative."""
        return self._alive[0].forced(token_ids, num_prompt) if len(self._alive) == 1 else []

    def _leave_failed(self) -> None:
        left = [one for one in self._alive if one.error is None]
        if not left:
            self.error = self._alive[0].error
        self._alive = left or self._alive
