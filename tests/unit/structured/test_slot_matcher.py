"""Slots of a canvas: ways to their ends are found for rules that branch, at a bounded price, and kept to the end."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from kvarn.decoding import slots as canvas_slots
from kvarn.decoding.canvas import Canvas, CanvasShape
from kvarn.decoding.slots import CanvasSlots
from kvarn.sampling.token_masks import allowed_tokens
from kvarn.structured.constraints import CanvasSlot, Constraint, Grammar, Regex
from kvarn.structured.slot_matcher import SlotMatcher
from tests.unit.structured.constrained import compiler, tokenizer

WORDS = tokenizer("byte")
NULL_ID = WORDS.eos_ids[0]
LONG = tuple(f"{i:03}{'z' * 200}{i:03}" for i in range(1000))  # masks of which take more than a step may
CHOICES = Grammar("start: " + " | ".join(f'"{one}"' for one in LONG))


def slot_of(constraint: Constraint, length: int, start: int = 0) -> CanvasSlot:
    compiled = compiler().compile(constraint)
    way = compiled.slot_matcher().completion(length)
    assert way is not None
    return CanvasSlot(start, length, compiled, NULL_ID, way)


class Writing:
    """Fills slots with tokens that are drawn from what may follow."""

    def __init__(self, *slots: CanvasSlot) -> None:
        self.slots = slots
        self.canvas = Canvas(CanvasShape(0, slots[-1].end, slots[-1].end), (), NULL_ID, {})
        self.open = CanvasSlots(slots, self.canvas)

    def step(self, seed: int) -> bool:
        """Fill the next position of each slot; False: all are full."""
        positions = self.open.fillable(np.flatnonzero(self.canvas.is_masked))
        if not len(positions):
            return False
        drawn = np.array([self._drawn(int(position), seed) for position in positions], np.int32)
        token_ids = self.open.settled(positions, drawn)
        self.canvas.fill(positions, token_ids)
        self.open.take(positions, token_ids)
        return True

    def rebuilt(self) -> None:
        """As after a preemption: the slots are read from the canvas."""
        self.open = CanvasSlots(self.slots, self.canvas)

    def texts(self) -> list[str]:
        parts = (self.canvas.token_ids[slot.start : slot.end].tolist() for slot in self.slots)
        return [b"".join(WORDS.token_bytes(i) for i in ids if i != NULL_ID).decode() for ids in parts]

    def _drawn(self, position: int, seed: int) -> int:
        mask = self.open._open[position].mask()
        allowed = allowed_tokens(mask, WORDS.vocab_size).nonzero()[0]
        assert len(allowed), "nothing may follow"
        return int(random.Random(f"{seed} {position}").choice(allowed))


@pytest.mark.parametrize("pattern", ["(a|aa|aaa)*b{30}", "[a-z]{40}", "x{0,400}y", "(a|b)*c(d|e){9}", "b{3}|a{12}"])
def test_a_slot_ends_in_a_text_of_its_rule_whatever_is_drawn(pattern: str) -> None:
    for seed in range(5):
        writing = Writing(slot_of(Regex(pattern), 44))
        while writing.step(seed):
            pass
        assert re.fullmatch(pattern, writing.texts()[0]), writing.texts()


def test_slots_read_from_the_canvas_go_on_as_the_ones_that_wrote_it() -> None:
    rules = slot_of(Regex("(a|b)*c(d|e){9}"), 24), slot_of(Regex("[a-z]{20}"), 24, start=24)
    for seed in range(4):
        whole, again = Writing(*rules), Writing(*rules)
        while whole.step(seed):
            again.step(seed)
            again.rebuilt()
        assert whole.texts() == again.texts()


def test_where_a_mask_takes_too_long_the_known_way_is_written() -> None:
    writing = Writing(slot_of(CHOICES, 210))
    while writing.step(0):
        pass
    assert writing.texts()[0] in LONG


@pytest.mark.parametrize("num_slots", [1, 40])
def test_a_step_looks_at_a_bounded_number_of_positions(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    following = SlotMatcher.next_ids
    rules = [slot_of(Regex("(a|b|c){90}|[d-z]+(0[1-9]|5[a-z]){40}"), 100, start=100 * i) for i in range(num_slots)]
    writing = Writing(*rules)
    monkeypatch.setattr(SlotMatcher, "next_ids", lambda self: looked.append(1) or following(self))
    most = 0
    for seed in range(12):
        looked.clear()
        writing.step(seed)
        most = max(most, len(looked))
    assert most <= canvas_slots.MAX_SEARCHED
