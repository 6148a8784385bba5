"""A grammar that waits: an answer is free until a tool call begins in it, and the rest of the call follows its schema.

A watch reads the text and says where a call has begun; a prefix of the grammar (which is never written) says which
part of it follows. All of it is a function of the answer's tokens, so preemption and company do not change it.
A grammar that does not take what was written, or comes to a dead end, lets go: the answer is free again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvarn.errors import ConstraintError
from kvarn.structured.matcher import GrammarMatcher, UInt32, allowed_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from kvarn.structured.compiler import CompiledConstraint


@dataclass(frozen=True, slots=True)
class Trigger:
    """Where the grammar takes over."""

    prefix: str  # of the grammar: which part of it follows
    at: int  # in the text of the answer, in characters
    written: str  # since then


class CallWatch(Protocol):
    """Reads an answer as the one who parses it will."""

    def push(self, text: str) -> None:
        """Read on."""

    @property
    def num_calls(self) -> int:
        """Whole calls so far."""

    @property
    def trigger(self) -> Trigger | None:
        """The call that has begun and is not whole."""


@dataclass(frozen=True, slots=True)
class LazyConstraint:
    """A compiled grammar and what its matchers need; every answer has its own watch."""

    compiled: CompiledConstraint
    make_watch: Callable[[], CallWatch]
    token_bytes: Callable[[int], bytes]  # of a token as it stands in the text; none: it does not
    max_calls: int | None = None  # the answer ends after so many

    def matcher(self) -> LazyMatcher:
        return LazyMatcher(self)


class LazyMatcher:
    """Follows the tokens of one answer."""

    error: ConstraintError | None = None  # there is none: a grammar that fails lets go

    def __init__(self, constraint: LazyConstraint) -> None:
        self._constraint = constraint
        self._grammar: LLMatcher | None = None
        self._num_accepted = 0
        self._tried_at = -1  # where the last call had begun
        self._restart()

    def mask_after(self, token_ids: Sequence[int], num_prompt: int) -> UInt32 | None:
        """One bit per token that may follow; None: any may."""
        self._advance_to(token_ids, num_prompt)
        if self._grammar is None:
            return None
        mask = allowed_mask(self._grammar, self._constraint.compiled.allowed)
        if mask is None:
            self._grammar = None
        return mask

    def accept_token(self, token_id: int) -> bool:
        """Take a sampled token; whether the answer has all the calls it may have."""
        self._num_accepted += 1
        self._watch.push(self._decoder.decode(self._constraint.token_bytes(token_id)))
        if self._grammar is None:
            self._begin()
        elif not self._grammar.consume_token(token_id) or self._grammar.is_accepting():
            self._grammar = None
        max_calls = self._constraint.max_calls
        return max_calls is not None and self._watch.num_calls >= max_calls

    def fork(self) -> GrammarMatcher:
        """The grammar of the call under way alone, at the same token; only where num_valid() was above 0."""
        assert self._grammar is not None
        return GrammarMatcher(self._grammar, self._constraint.compiled.allowed, self._num_accepted)

    def num_valid(self, token_ids: Sequence[int], num_prompt: int, drafts: Sequence[int]) -> int:
        """How many of the drafts may follow token_ids within the call under way; none in free text, whose watch has
        to read every token before the next may be masked."""
        self._advance_to(token_ids, num_prompt)
        if self._grammar is None:
            return 0
        grammar = self._grammar.deep_copy()
        for count, token_id in enumerate(drafts):
            if grammar.validate_tokens([token_id]) != 1 or not grammar.consume_token(token_id):
                return count
            if grammar.is_accepting() or grammar.is_stopped():
                return count
        return len(drafts)

    def forced(self, token_ids: Sequence[int], num_prompt: int) -> list[int]:
        """The tokens after token_ids that have no alternative."""
        self._advance_to(token_ids, num_prompt)
        return [] if self._grammar is None else list(self._grammar.compute_ff_tokens())

    def _advance_to(self, token_ids: Sequence[int], num_prompt: int) -> None:
        if self._num_accepted > len(token_ids) - num_prompt:  # a step was undone
            self._restart()
        for token_id in token_ids[num_prompt + self._num_accepted :]:
            self.accept_token(token_id)

    def _begin(self) -> None:
        """Start the grammar where a call has begun, once for each."""
        trigger = self._watch.trigger
        if trigger is None or trigger.at <= self._tried_at:
            return
        self._tried_at = trigger.at
        compiled = self._constraint.compiled
        written = trigger.prefix + trigger.written
        try:
            written += self._decoder.getstate()[0].decode("ascii")  # half a character: no name or key has one
        except UnicodeDecodeError:
            return
        grammar = compiled.start.deep_copy()
        if grammar.consume_tokens(compiled.trie.greedy_tokenize(written)) and not grammar.is_accepting():
            self._grammar = grammar

    def _restart(self) -> None:
        self._watch = self._constraint.make_watch()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._grammar, self._num_accepted, self._tried_at = None, 0, -1
