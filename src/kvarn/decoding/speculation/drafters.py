"""Where drafts come from: the predicted answer, the prompt and the answer so far, the tenant's earlier answers.

All three follow a text from which the answer may be copied: a cursor stands behind the place that the answer repeats,
moves on while it goes on repeating, and is looked for anew when it does not. Nothing here computes with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvarn.decoding.speculation.suffix_index import MAX_MATCH, Occurrence, SuffixIndex
from kvarn.request import Request

RESYNC = {2: 256, 1: 48}  # tokens behind the place where an answer left a text in which so many equal ones are enough
MIN_SURE = 4  # equal tokens, with which a place elsewhere is better than one nearby


class Proposal(NamedTuple):
    """Tokens that may come next; match: how many before them are the same where they come from."""

    source: str
    token_ids: Sequence[int]
    match: int


class Drafter(Protocol):
    """Follows one request."""

    source: str  # what its proposals are called in acceptance rates and metrics

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        """What may follow the request's tokens; None: it has no idea. Called before every step it may be in."""


class PromptLookup:
    """What followed the same tokens earlier in the prompt or the answer."""

    source = "ngram"

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._at: int | None = None
        self._match = 0

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        self._read(request.token_ids)
        if self._at is None:
            return None
        return Proposal(self.source, self._index.following(self._at, max_tokens), self._match)

    def _read(self, token_ids: Sequence[int]) -> None:
        index = self._index
        if not index.token_ids:
            self._index = index = SuffixIndex(token_ids[:-1])
        new = token_ids[len(index.token_ids) :]
        for token_id in new[:-1]:
            self._follow(token_id)
            index.append(token_id)
        for token_id in new[-1:]:
            self._follow(token_id)
            if self._at is None and (found := index.find(token_ids[-MAX_MATCH:])) is not None:
                self._at, self._match = found
            index.append(token_id)  # after the search: it must not find itself

    def _follow(self, token_id: int) -> None:
        at, known = self._at, self._index.token_ids
        is_right = at is not None and at < len(known) and known[at] == token_id
        self._at, self._match = (at + 1, self._match + 1) if is_right and at is not None else (None, 0)


class CopyCursor:
    """Follows a text that does not change while it is followed.

    starts_after: tokens of the request after which it is expected to begin; then the nearest place is taken when it has
    to be found again, otherwise the one where most is the same.
    """

    def __init__(self, index: SuffixIndex, starts_after: int | None = None) -> None:
        self._index = index
        self._at = self._left_at = None if starts_after is None else 0  # left_at: where the answer went another way
        self._prefers_near = starts_after is not None
        self._match = 0
        self._num_read = starts_after or 0
        self._num_forgotten = index.num_forgotten

    def following(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int] | None:
        """What comes next there, and how many tokens before it are the same."""
        if self._num_forgotten != self._index.num_forgotten:
            self._at, self._left_at, self._num_forgotten = None, None, self._index.num_forgotten
        for token_id in token_ids[self._num_read :] if self._at is not None else ():
            self._follow(token_id)
        self._num_read = len(token_ids)
        if self._at is None:
            self._find(token_ids[-MAX_MATCH:])
        if self._at is None:
            return None
        found = self._index.following(self._at, min(max_tokens, len(self._index.token_ids) - self._at))
        return (found, self._match) if found else None

    def _follow(self, token_id: int) -> None:
        at, known = self._at, self._index.token_ids
        if at is None:
            return
        if at < len(known) and known[at] == token_id:
            self._at, self._match = at + 1, self._match + 1
        else:
            self._at, self._match, self._left_at = None, 0, at

    def _find(self, end: Sequence[int]) -> None:
        near = self._near(end, 2) if self._prefers_near else None
        found = near or self._index.find(end)
        if found is None or found.length < MIN_SURE:
            found = self._near(end, 2) or found or self._near(end, 1)
        if found is not None:
            self._at, self._match = found

    def _near(self, end: Sequence[int], length: int) -> Occurrence | None:
        """Where so many tokens stand behind the place that the answer left, as after an insertion or a deletion."""
        known, first = self._index.token_ids, self._left_at
        if first is None or len(end) < length:
            return None
        last = end[-1]
        for at in range(first + length - 1, min(first + RESYNC[length], len(known))):
            if known[at] == last and (length == 1 or known[at - 1] == end[-2]):
                return Occurrence(at + 1, length)
        return None


class PredictedAnswer:
    """The answer that the caller expects, as with an edit of a text."""

    source = "prediction"

    def __init__(self, token_ids: Sequence[int], starts_after: int) -> None:
        self._cursor = CopyCursor(SuffixIndex(token_ids), starts_after)

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        found = self._cursor.following(request.token_ids, max_tokens)
        return None if found is None else Proposal(self.source, *found)


class EarlierAnswers:
    """What the tenant was answered before."""

    source = "suffix"

    def __init__(self, index: SuffixIndex) -> None:
        self._cursor = CopyCursor(index)

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        found = self._cursor.following(request.token_ids, max_tokens)
        return None if found is None else Proposal(self.source, *found)
