"""The slots of one canvas: each written from left to right under its constraint, all of them in the same steps.

A position of a slot is only filled with a token after which the rest of the slot can still be finished in the positions
that are left, so that every slot ends in a text that its constraint accepts. What a slot does not need is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvarn.backends.batch import Int32, RowSampling
from kvarn.decoding.canvas import Bits, Canvas, Positions
from kvarn.sampling.token_masks import UInt32
from kvarn.structured.constraints import CanvasSlot
from kvarn.structured.slot_matcher import SlotMatcher

# Positions of grammars that the slots of a canvas look at in a step, in all: other requests wait meanwhile (about 35 us
# each with 13,000 tokens). Slots that find nothing go on by the way they know.
MAX_SEARCHED = 400


class CanvasSlots:
    """The slots of one canvas, as far as they are written; a function of its tokens."""

    def __init__(self, slots: Sequence[CanvasSlot], canvas: Canvas) -> None:
        first = canvas.shape.num_prompt
        self._canvas = canvas
        self._is_slot: Bits = np.zeros(canvas.shape.length, bool)
        self._open: dict[int, _OpenSlot] = {}  # by the position that is written next
        for slot in slots:
            self._is_slot[first + slot.start : first + slot.end] = True
            self._add(_OpenSlot(slot, first, MAX_SEARCHED // len(slots)))

    def __bool__(self) -> bool:
        return bool(self._is_slot.any())

    def contain(self, positions: Positions) -> Bits:
        """Which positions lie in a slot."""
        return self._is_slot[positions]

    def outside(self, positions: Positions) -> Positions:
        """Those that lie in none."""
        return positions[~self._is_slot[positions]]

    def fillable(self, masked: Positions) -> Positions:
        """Those that this step may fill: outside of slots all, of each slot the next one."""
        if not self:
            return masked
        is_next = np.isin(masked, np.fromiter(self._open, np.intp, len(self._open)))
        return masked[is_next | ~self._is_slot[masked]]

    def masked(self, row: RowSampling) -> RowSampling:
        """The row of a position with the tokens that may stand there."""
        slot = self._open.get(row.position)
        return row if slot is None else row.at(row.position, draw=row.draw, mask=slot.mask())

    def settled(self, positions: Positions, token_ids: Int32) -> Int32:
        """The tokens that positions get: in slots, one with which the slot can be finished. Changes nothing."""
        if not self:
            return token_ids
        pairs = zip(positions.tolist(), token_ids.tolist(), strict=True)
        settled = [token if (slot := self._open.get(at)) is None else slot.settled(token) for at, token in pairs]
        return np.array(settled, np.int32)

    def take(self, positions: Positions, token_ids: Int32) -> None:
        """Go on in the slots of positions that were filled; what lies after the end of one is filled with null."""
        for position, token_id in zip(positions.tolist(), token_ids.tolist(), strict=True):
            slot = self._open.pop(position, None)
            if slot is not None:
                slot.take(token_id)
                self._add(slot)

    def _add(self, slot: _OpenSlot) -> None:
        """Read what is written of a slot already, and keep it while it is open."""
        canvas = self._canvas
        while not slot.is_ended and not canvas.is_masked[slot.position]:
            slot.take(int(canvas.token_ids[slot.position]))
        if not slot.is_ended:
            self._open[slot.position] = slot
            return
        rest = np.arange(slot.position, slot.end)
        rest = rest[canvas.is_masked[rest]]
        canvas.fill(rest, np.full(len(rest), slot.null_id, np.int32))


class _OpenSlot:
    """One slot up to the position that is written next."""

    def __init__(self, slot: CanvasSlot, first: int, max_searched: int) -> None:
        """first: the position of the answer's first token; max_searched: of the grammar's positions, after a token."""
        self.position = first + slot.start
        self.end = first + slot.end
        self.null_id = slot.null_id
        self._end_ids = slot.end_ids | {slot.null_id}
        self._matcher: SlotMatcher = slot.compiled.slot_matcher()
        self._max_searched = max_searched
        self._way = slot.way  # from here to where the slot may end; a function of the tokens written
        self._searched: tuple[int, tuple[int, ...] | None] | None = None  # a token that may follow here, and its way
        self._is_null = False

    @property
    def is_ended(self) -> bool:
        if self._matcher.is_failed and self._way:
            return False  # the grammar's limits were reached: the known way alone goes on
        return self._is_null or self.position >= self.end or self._matcher.is_stopped

    def mask(self) -> UInt32:
        """The tokens that may follow; where the slot may end, those that end it too."""
        # A copy computes it: what a mask leaves in a matcher would make later limits depend on earlier steps.
        mask = self._matcher.copy().mask()
        if self._matcher.is_accepting:
            _set_bits(mask, self._end_ids)
        if not mask.any():  # computing it took more than the grammar's limits allow
            _set_bits(mask, self._way[:1] or {self.null_id})
        return mask

    def settled(self, token_id: int) -> int:
        """This token, or the first of the known way to the end where it would not leave one."""
        if token_id in self._end_ids and self._matcher.is_accepting:
            return self.null_id
        if self._way_after(token_id) is not None:
            return token_id
        return self._way[0] if self._way else self.null_id

    def take(self, token_id: int) -> None:
        way = None if token_id == self.null_id else self._way_after(token_id)
        self.position += 1
        self._searched = None
        if way is None:
            self._is_null = True
            return
        self._way = way
        self._matcher.take(token_id)

    def _way_after(self, token_id: int) -> tuple[int, ...] | None:
        """A way to the end from the position after this token; None: the token may not follow, or none was found."""
        if self._way[:1] == (token_id,):
            return self._way[1:]
        if self._searched is None or self._searched[0] != token_id:
            self._searched = token_id, self._search_after(token_id)
        return self._searched[1]

    def _search_after(self, token_id: int) -> tuple[int, ...] | None:
        following = self._matcher.after(token_id)
        if following is None:
            return None
        room = self.end - self.position - 1
        like = following.completion_like(self._way, token_id, room)
        return like if like is not None else following.completion(room, self._max_searched)


def _set_bits(mask: UInt32, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
