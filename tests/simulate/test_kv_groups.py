"""A cache that has all three kinds of layers: those that keep every token, those that keep a window, recurrent ones.

Against a slow model that holds the tokens behind every block and every state. After each operation each sequence reads
exactly its own tokens in both groups, a step starts from the state behind its own tokens, and check() holds.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape
from kvarn.kv.states import NO_STATE
from tests.conftest import Size

GARBAGE = -1
BLOCK, WINDOW, STEP = 4, 9, 12  # a window that is no whole number of blocks
EVENTS = ("hits", "in windows", "at snapshots", "undone", "refused", "evictions", "evictions of windows", "reclaimed")
POOLS = ((24, 9, 8), (26, 11, 12), (30, 12, 16), (70, 30, 40))  # blocks, those of windows, slots of states


class Simulation:
    """One cache, what stands in its memory, and random operations."""

    def __init__(self, num_blocks: int, num_window_blocks: int, num_states: int, seed: int) -> None:
        self.rng = random.Random(f"{num_blocks} blocks, {num_states} states, seed {seed}")
        window = WindowShape(WINDOW, num_window_blocks, STEP)
        self.cache = KVCache(num_blocks, BLOCK, num_states=num_states, window=window)
        self.memory = [np.full((count, BLOCK), GARBAGE) for count in (num_blocks, num_window_blocks)]
        self.states: dict[int, tuple[int, ...]] = {}
        self.texts: dict[str, list[int]] = {}
        self.old_texts = [[0]]
        self.seen: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        operations = {self.start: 20, self.step: 70, self.release: 6, self.keep: 3, self.reclaim: 1}
        for operation in self.rng.choices(list(operations), list(operations.values()), k=num_operations):
            operation()
            self.check()

    def start(self) -> None:
        assert self.cache.states is not None
        if len(self.texts) == self.cache.states.max_sequences:
            self.release()
        name, text = f"s{self.seen['started']}", self.text()
        self.seen["started"] += 1
        hit = self.cache.lookup(text)
        self.seen["hits"] += hit.num_tokens > 0
        matched = hit.digests and self.cache.groups[1].longest(self.cache.digests(text)) * BLOCK
        self.seen["in windows"] += bool(matched) and matched < hit.num_matched
        self.seen["at snapshots"] += 0 < hit.num_tokens < hit.num_matched
        self.cache.fork(name, hit)
        self.texts[name] = text

    def text(self) -> list[int]:
        """One like those before, with another end."""
        before = self.rng.choice(self.old_texts)
        kept = self.rng.choice([len(before), self.rng.randint(0, len(before))])
        return [*before[:kept], *(self.rng.randrange(2) for _ in range(self.rng.randint(1, 40)))][:80]

    def step(self) -> None:
        """As an engine computes: room, copies, all tokens of the step, and then they count; or the step failed."""
        if not self.texts:
            return
        name = self.rng.choice(list(self.texts))
        start, text = self.cache.num_tokens(name), self.texts[name]
        end = min(start + self.rng.choice([1, 1, 2, BLOCK, self.rng.randint(1, STEP)]), len(text))
        if end == start:
            self.end(name)
            return
        copies = self.cache.extend(name, end - start)
        if copies is None:
            self.seen["refused"] += 1
            self.end(self.rng.choice(list(self.texts)))
            return
        self.compute(name, copies, start, end)
        if self.rng.random() < 0.1:
            self.cache.trim(name, start)
            self.seen["undone"] += 1
            return
        self.cache.publish(name, text, num_computed=end, is_decoding=end - start == 1)
        self.cache.advance(name, end)

    def compute(self, name: str, copies: list[BlockCopy], start: int, end: int) -> None:
        for copy in copies:
            self.memory[copy.group][copy.target, : copy.num_tokens] = self.memory[copy.group][
                copy.source, : copy.num_tokens
            ]
        text = self.texts[name]
        for memory, table in zip(self.memory, self.tables(name), strict=True):
            for position in range(start, end):
                memory[table[position // BLOCK], position % BLOCK] = text[position]
        assert self.cache.states is not None
        state = self.cache.states.state_of(name)
        assert (state.start, state.end) == (start, end)
        held = () if state.read == NO_STATE else self.states[state.read]
        assert held == tuple(text[:start]), "a step starts from the state of other tokens"
        for row, slot in state.saved_rows():
            self.states[slot] = tuple(text[: start + row + 1])
        self.states[state.written] = tuple(text[:end])

    def tables(self, name: str) -> list[list[int]]:
        in_window = self.cache.window_ids(name)
        assert in_window is not None
        return [self.cache.block_ids(name).tolist(), in_window.tolist()]

    def release(self) -> None:
        if self.texts:
            self.end(self.rng.choice(list(self.texts)))

    def end(self, name: str) -> None:
        self.cache.release(name, unpublish=self.rng.random() < 0.1)
        self.old_texts = [*self.old_texts[-20:], self.texts.pop(name)]

    def keep(self) -> None:
        if self.texts:
            name = self.rng.choice(list(self.texts))
            self.cache.keep(name, self.rng.randint(0, self.cache.num_tokens(name)))

    def reclaim(self) -> None:
        drop_cached = self.rng.random() < 0.3
        for group, memory in enumerate(self.memory):
            given_back = self.cache.reclaim(drop_cached=drop_cached, group=group)
            memory[given_back] = GARBAGE
            self.seen["reclaimed"] += len(given_back)
        assert self.cache.states is not None
        for slot in self.cache.states.reclaim():
            self.states.pop(slot, None)

    def check(self) -> None:
        self.cache.check()
        for name, text in self.texts.items():
            count = self.cache.num_tokens(name)
            if not count:
                continue
            for number, (memory, table) in enumerate(zip(self.memory, self.tables(name), strict=True)):
                first = 0 if number == 0 else max(0, count - WINDOW) // BLOCK
                found = memory[table[first:]].ravel().tolist()[: count - first * BLOCK]
                assert min(table[first:]) >= 0, "a block that the next query reads is gone"
                assert found == text[first * BLOCK : count], f"group {number} of {name} reads what it did not write"


@pytest.mark.parametrize(("num_blocks", "num_window_blocks", "num_states"), POOLS)
def test_three_kinds_of_layers_never_mix_up_tokens(
    num_blocks: int, num_window_blocks: int, num_states: int, size: Size
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        simulation = Simulation(num_blocks, num_window_blocks, num_states, seed)
        simulation.run(size(800, 20_000))
        seen += simulation.seen
        seen["evictions"] += simulation.cache.stats().evictions
        seen["evictions of windows"] += simulation.cache.stats(1).evictions
        for name in list(simulation.texts):
            simulation.end(name)
        simulation.cache.check()
        assert [simulation.cache.stats(group).used for group in (0, 1)] == [0, 0]
    assert all(seen[event] > 0 for event in EVENTS), f"not everything came up: {seen}"
