"""What a prefix cache holds, for others who choose where to send a request: every change, or all of it at once.

Written by the engine's thread as blocks come and go. Knows digests; never a token, never a reference count.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.routing.changes import LOST, MAX_TEXTS, NAMED, ROOT, STORED, PrefixChange, short_digest
from kvarn.routing.text_prefix import MAX_SHARE

MAX_CHANGES = 1 << 16  # that wait to be taken; beyond that everything is told anew


class PrefixJournal:
    """The blocks of one cache, the texts that name them, and what changed since it was last asked."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}  # digest to its parent and the tokens up to its end
        self._texts: dict[int, int] = {}  # to blocks
        self._texts_of: dict[int, list[int]] = {}
        self._changes: list[PrefixChange] = []
        self._is_torn = True  # who asks first is told everything

    def stored(self, digest: bytes, parent: bytes | None, num_tokens: int) -> None:
        """A block became findable."""
        block = short_digest(digest)
        ancestor = ROOT if parent is None else short_digest(parent)
        self._blocks[block] = ancestor, num_tokens
        self._tell(PrefixChange(STORED, block, ancestor, num_tokens))

    def lost(self, digest: bytes) -> None:
        """The content of a findable block is given up."""
        block = short_digest(digest)
        if self._blocks.pop(block, None) is None:
            return
        for text in self._texts_of.pop(block, ()):
            del self._texts[text]
        self._tell(PrefixChange(LOST, block))

    def name_texts(self, digests: Sequence[bytes | None], num_blocks: int, marks: Sequence[tuple[int, int]]) -> None:
        """Texts of a prompt of num_blocks full blocks end in some of these; marks: texts and their shares of it.

        Of several texts that end in one block the first is enough: who has a later one has that, too.
        """
        last = 0
        for text, share in marks:
            number = min(num_blocks * share // MAX_SHARE, len(digests))
            if number > last and (digest := digests[number - 1]) is not None:
                last = number
                self._name(text, digest)

    def take(self) -> tuple[bool, list[PrefixChange]]:
        """What to tell next; True: it is all there is, and what was told before does not count any more."""
        is_all, self._is_torn = self._is_torn, False
        changes, self._changes = self.everything() if is_all else self._changes, []
        return is_all, changes

    def everything(self) -> list[PrefixChange]:
        """All blocks and names as changes of an empty table."""
        blocks = [PrefixChange(STORED, block, *about) for block, about in self._blocks.items()]
        return blocks + [PrefixChange(NAMED, text, block) for text, block in self._texts.items()]

    def _name(self, text: int, digest: bytes) -> None:
        """Prompts that begin with a text begin with this block and those before it."""
        block, before = short_digest(digest), self._texts.get(text)
        if block not in self._blocks or before == block:
            return
        names = self._texts_of.setdefault(block, [])
        if len(names) >= MAX_TEXTS:
            return
        if before is not None:
            if self._blocks[before][1] <= self._blocks[block][1]:
                return
            self._texts_of[before].remove(text)
        self._texts[text] = block
        names.append(text)
        self._tell(PrefixChange(NAMED, text, block))

    def _tell(self, change: PrefixChange) -> None:
        if self._is_torn:
            return
        self._changes.append(change)
        if len(self._changes) > MAX_CHANGES:
            self._changes, self._is_torn = [], True
