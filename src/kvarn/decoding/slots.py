"""The slots of one canvas: each written from left to right under its constraint, all of them in the same steps.

A position of a slot is only filled with a token after which the rest of the slot can still be finished in the positions
that are left, so that every slot ends in a text that its constraint accepts. What a slot does not need is null.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvarn.backends.batch import Int32, RowSampling
from kvarn.decoding.canvas import Bits, Canvas, Positions
from kvarn.sampling.token_masks import UInt32
from kvarn.structured.constraints import CanvasSlot
from kvarn.structured.slot_matcher import SlotMatcher


class CanvasSlots:
    """The slots of one canvas, as far as they are written; a function of its tokens."""

    def __init__(self, slots: Sequence[CanvasSlot], canvas: Canvas) -> None:
        first = canvas.shape.num_prompt
        self._canvas = canvas
        self._is_slot: Bits = np.zeros(canvas.shape.length, bool)
        self._open: dict[int, _OpenSlot] = {}  # by the position that is written next
        for slot in slots:
            self._is_slot[first + slot.start : first + slot.end] = True
            self._add(_OpenSlot(slot, first))

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

    def __init__(self, slot: CanvasSlot, first: int) -> None:
        """first: the position of the answer's first token."""
        self.position = first + slot.start
        self.end = first + slot.end
        self.null_id = slot.null_id
        self._end_ids = slot.end_ids | {slot.null_id}
        self._matcher: SlotMatcher = slot.compiled.slot_matcher()
        self._is_null = False

    @property
    def is_ended(self) -> bool:
        return self._is_null or self.position >= self.end or self._matcher.is_stopped

    def mask(self) -> UInt32:
        """The tokens that may follow; where the slot may end, those that end it too."""
        mask = self._matcher.mask()
        if self._matcher.is_accepting:
            for token_id in self._end_ids:
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return mask

    def settled(self, token_id: int) -> int:
        """This token, or the first of a way to the end where it would not leave one."""
        if token_id in self._end_ids and self._matcher.is_accepting:
            return self.null_id
        num_left = self.end - self.position
        following = self._matcher.after(token_id)
        if following is not None and following.completion(num_left - 1) is not None:
            return token_id
        way = self._matcher.completion(num_left)
        assert way is not None, "a token was taken that left no way to the end"
        return way[0] if way else self.null_id

    def take(self, token_id: int) -> None:
        self.position += 1
        if token_id == self.null_id:
            self._is_null = True
        else:
            self._matcher.take(token_id)
