"""Which replicas hold which blocks of which prompts: what all of them told, in one table.

    text ──names──> block ──parent──> block ──> ... ──> first block      each with a set of replicas, bits of one number

Knows numbers of replicas and digests; never a prompt, a token or an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvarn.routing.changes import LOST, MAX_TEXTS, NAMED, STORED, PrefixChange


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Where a prompt's prefix lies: (replicas as bits, tokens they hold), the most tokens first, no replica twice."""

    levels: tuple[tuple[int, int], ...] = ()
    text: int | None = None  # which of the texts asked for was known, by its place
    num_tokens: int = 0  # up to the end of that text, as some replica once counted

    def tokens_of(self, replica: int) -> int:
        """Tokens of the prefix that a replica holds."""
        return next((count for replicas, count in self.levels if replicas >> replica & 1), 0)


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class _HeldBlock:
    replicas: int  # bits
    parent: int
    num_tokens: int
    texts: list[int] | None = None  # that name it


class FleetIndex:
    """The blocks of all replicas. Forgets what no replica holds."""

    def __init__(self) -> None:
        self._blocks: dict[int, _HeldBlock] = {}
        self._texts: dict[int, int] = {}  # to blocks

    @property
    def num_blocks(self) -> int:
        """Different ones, however many replicas hold each."""
        return len(self._blocks)

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def apply(self, replica: int, changes: Iterable[PrefixChange]) -> None:
        """Take over what a replica told, in its order."""
        bit = 1 << replica
        for kind, digest, other, num_tokens in changes:
            if kind == STORED:
                held = self._blocks.get(digest)
                if held is None:
                    self._blocks[digest] = _HeldBlock(bit, other, num_tokens)
                else:
                    held.replicas |= bit
            elif kind == LOST:
                self._lose(digest, bit)
            elif kind == NAMED:
                self._name(digest, other)

    def reset(self, replica: int) -> None:
        """Forget all that a replica holds: it tells everything anew, or is gone."""
        bit = 1 << replica
        for digest in [digest for digest, held in self._blocks.items() if held.replicas & bit]:
            self._lose(digest, bit)

    def match(self, texts: Sequence[int], replicas: int) -> PrefixMatch:
        """Find the longest known of a prompt's texts, and how much of it each of the given replicas holds."""
        known, names = self._blocks, self._texts
        for place in range(len(texts) - 1, -1, -1):
            block = known.get(names.get(texts[place], 0))
            if block is None:
                continue
            levels, total, left = [], block.num_tokens, replicas
            while block is not None and left:
                found = block.replicas & left
                if found:
                    levels.append((found, block.num_tokens))
                    left &= ~found
                block = known.get(block.parent)
            return PrefixMatch(tuple(levels), place, total)
        return NO_MATCH

    def digests_of(self, replica: int) -> Iterator[int]:
        """All blocks of a replica."""
        return (digest for digest, held in self._blocks.items() if held.replicas >> replica & 1)

    def block_of(self, text: int) -> int | None:
        return self._texts.get(text)

    def check(self) -> None:
        """Assert that every text names a block that somebody holds, and that blocks know their texts."""
        assert all(held.replicas for held in self._blocks.values()), "a block is kept that nobody holds"
        named = {(text, digest) for digest, held in self._blocks.items() for text in held.texts or ()}
        assert named == set(self._texts.items()), "texts and blocks disagree"

    def _name(self, text: int, digest: int) -> None:
        """Of two blocks for one text the earlier counts: where the text ends is an estimate, and less is surely so."""
        held, before = self._blocks.get(digest), self._texts.get(text)
        if held is None or before == digest or len(held.texts or ()) >= MAX_TEXTS:
            return
        if before is not None:
            earlier = self._blocks[before]
            if earlier.num_tokens <= held.num_tokens:
                return
            assert earlier.texts is not None
            earlier.texts.remove(text)
        self._texts[text] = digest
        held.texts = [*(held.texts or ()), text]

    def _lose(self, digest: int, bit: int) -> None:
        held = self._blocks.get(digest)
        if held is None:
            return
        held.replicas &= ~bit
        if not held.replicas:
            del self._blocks[digest]
            for text in held.texts or ():
                del self._texts[text]
