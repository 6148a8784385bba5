"""The KV cache against a slow model that keeps the tokens of every sequence and the content of every block.

After each operation every sequence, read through its block table, must give exactly its own tokens; everything a
lookup finds must hold the tokens asked for, computed for that tenant; and check() must hold.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import BlockCopy
from kvarn.kv.cache import KVCache
from kvarn.kv.prefix import PrefixHit
from tests.conftest import Size

GARBAGE = -1
TENANTS = ("", "one", "two")
EVENTS = ("hits", "copied", "rewritten", "refused", "evictions", "reclaimed")
POOLS = (2, 3, 7, 40, 150, 500)  # blocks


class Simulation:
    """One cache, its model, and random operations on both."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.rng = random.Random(f"{num_blocks} blocks, seed {seed}")
        self.block_size = self.rng.choice([1, 2, 3, 4, 4, 8])
        self.num_blocks = num_blocks
        self.max_sequences = self.rng.randint(2, max(2, min(12, num_blocks)))
        self.max_growth = self.block_size * max(2, 2 * num_blocks // self.max_sequences)  # so that the pool fills up
        self.cache = KVCache(num_blocks, self.block_size)
        self.memory = np.full((num_blocks, self.block_size), GARBAGE, np.int32)
        self.tokens: dict[str, list[int]] = {}
        self.tenants: dict[str, str] = {}
        self.num_published: dict[str, int] = {}  # leading tokens of a living sequence that must be found
        self.published: set[tuple[str, tuple[int, ...]]] = set()  # every prefix ever published
        self.texts: list[tuple[str, list[int]]] = [("", [0])]  # what lookups try
        self.returned = set(range(num_blocks))  # no memory behind them
        self.seen: Counter[str] = Counter()
        self.num_started = 0

    def run(self, num_operations: int) -> None:
        operations = {
            self.grow: 30,
            self.grow_and_roll_back: 5,
            self.start: 8,
            self.fork: 8,
            self.look_up_and_fork: 20,
            self.publish: 30,
            self.keep: 4,
            self.trim: 8,
            self.release: 4,
            self.unpublish: 2,
            self.reclaim: 1,
        }
        chosen = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
        for operation in chosen:
            operation()
            self.check()

    # Operations

    def grow(self) -> None:
        if name := self.pick():
            self.extend(name)

    def grow_and_roll_back(self) -> None:
        """A step that failed after it had written."""
        if name := self.pick():
            start = len(self.tokens[name])
            if self.extend(name):
                self.cache.trim(name, start)
                del self.tokens[name][start:]

    def start(self) -> None:
        name = self.new_name()
        self.tokens[name], self.tenants[name], self.num_published[name] = [], self.rng.choice(TENANTS), 0
        if not self.extend(name):
            self.end(name)

    def fork(self) -> None:
        name, source = self.new_name(), self.pick()
        if source is None:
            return
        held = len(self.tokens[source])
        num_tokens = self.rng.choice([None, held, max(0, held - 1), self.rng.randint(0, held)])
        self.cache.fork(name, source, num_tokens)
        self.tokens[name] = self.tokens[source][:num_tokens]
        self.tenants[name] = self.tenants[source]
        self.num_published[name] = self.whole(min(self.num_published[source], len(self.tokens[name])))

    def look_up_and_fork(self) -> None:
        name, (tenant, token_ids) = self.new_name(), self.prompt()
        hit = self.look_up(tenant, token_ids)
        num_tokens = self.rng.choice([None, None, None, self.rng.randint(0, hit.num_tokens)])
        self.cache.fork(name, hit, num_tokens)
        self.tokens[name] = token_ids[: hit.num_tokens if num_tokens is None else num_tokens]
        self.tenants[name], self.num_published[name] = tenant, self.whole(len(self.tokens[name]))
        self.seen["hits"] += hit.num_tokens > 0
        if not self.extend(name):
            self.cache.release(name)
            self.end(name)

    def publish(self) -> None:
        if name := self.pick():
            held = len(self.tokens[name])
            count = self.rng.choice([held, held, self.rng.randint(0, held)])
            beyond = [self.rng.randrange(3)] * self.rng.randrange(3) if count == held else []
            self.cache.publish(name, self.tokens[name][:count] + beyond, self.tenants[name])
            for end in range(self.block_size, count + 1, self.block_size):
                self.published.add((self.tenants[name], tuple(self.tokens[name][:end])))
            self.num_published[name] = max(self.num_published[name], self.whole(count))

    def keep(self) -> None:
        if name := self.pick():
            self.cache.keep(name, self.rng.randint(0, len(self.tokens[name])))

    def trim(self) -> None:
        if name := self.pick():
            count = self.rng.randint(0, len(self.tokens[name]))
            self.cache.trim(name, count)
            del self.tokens[name][count:]
            self.num_published[name] = min(self.num_published[name], self.whole(count))

    def release(self) -> None:
        if name := self.pick():
            self.cache.release(name)
            self.end(name)

    def unpublish(self) -> None:
        if name := self.pick():
            tenant, token_ids = self.tenants[name], [*self.tokens[name], 0]
            full = self.cache.block_ids(name)[: len(self.tokens[name]) // self.block_size].tolist()
            self.cache.release(name, unpublish=True)
            self.end(name)
            held = self.references()
            hit = self.look_up(tenant, token_ids)
            assert all(b in held for b in hit.block_ids if b in full), "a forgotten block is found"

    def reclaim(self) -> None:
        drop_cached = self.rng.random() < 0.3
        given_back = self.cache.reclaim(drop_cached=drop_cached)
        assert not self.returned & set(given_back), "memory is given back twice"
        assert not self.references().keys() & set(given_back), "memory in use is given back"
        assert not self.cache.reclaim()
        self.memory[given_back] = GARBAGE
        self.returned |= set(given_back)
        stats = self.cache.stats()
        assert stats.free == len(self.returned)
        assert not (drop_cached and stats.cached)
        self.seen["reclaimed"] += len(given_back)

    # The model

    def extend(self, name: str) -> bool:
        """Extend, make the copies, write the tokens; exactly what fits must be granted."""
        count = self.rng.choice([0, 1, 1, 2, self.block_size, self.rng.randint(1, self.max_growth)])
        start = len(self.tokens[name])
        needed = self.cache.blocks_for(start + count) - self.cache.blocks_for(start)
        held = self.references()
        is_partial = count > 0 and start % self.block_size > 0
        is_shared = is_partial and held[int(self.cache.block_ids(name)[-1])] > 1
        before = self.cache.block_ids(name).tolist() if start else []
        copies = self.cache.extend(name, count)
        assert (copies is None) == (needed + is_shared > self.num_blocks - len(held))
        if copies is None:
            assert self.cache.num_tokens(name) == start
            assert not start or self.cache.block_ids(name).tolist() == before
            self.seen["refused"] += 1
            self.preempt(name)
            return False
        assert is_shared <= len(copies) <= is_partial
        self.copy(copies)
        self.write(name, [self.rng.randrange(2) for _ in range(count)])
        self.seen["copied"] += len(copies)
        self.seen["rewritten"] += len(copies) - is_shared
        return True

    def preempt(self, refused: str) -> None:
        """Most of the time somebody else gives way; sometimes the pool stays full."""
        others = [name for name in self.tokens if name != refused]
        if others and self.rng.random() < 0.7:
            victim = self.rng.choice(others)
            self.cache.release(victim)
            self.end(victim)

    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            assert copy.source not in self.returned
            content = self.memory[copy.source, : copy.num_tokens].copy()
            self.memory[copy.target] = GARBAGE
            self.memory[copy.target, : copy.num_tokens] = content

    def write(self, name: str, token_ids: list[int]) -> None:
        for token_id in token_ids:
            block, slot = divmod(len(self.tokens[name]), self.block_size)
            self.memory[self.cache.block_ids(name)[block], slot] = token_id
            self.tokens[name].append(token_id)
        self.returned -= set(self.cache.block_ids(name).tolist())

    def look_up(self, tenant: str, token_ids: list[int]) -> PrefixHit:
        hit = self.cache.lookup(token_ids, tenant)
        found = token_ids[: hit.num_tokens]
        assert hit.num_tokens == len(hit.block_ids) * self.block_size
        assert hit.num_tokens < max(1, len(token_ids)), "nothing is left to compute"
        assert self.memory[list(hit.block_ids)].ravel().tolist() == found, "a stale hit"
        assert not found or (tenant, tuple(found)) in self.published, "nobody published this for the tenant"
        return hit

    def check(self) -> None:
        self.cache.check()
        for name, token_ids in self.tokens.items():
            assert self.read(name).tolist() == token_ids, f"sequence {name} reads what it did not write"
        if name := self.pick():
            hit = self.look_up(self.tenants[name], [*self.tokens[name], 0])
            assert hit.num_tokens >= self.num_published[name], "a published block that is held is not found"
        stats = self.cache.stats()
        held = self.references()
        assert (stats.used, stats.shared) == (len(held), sum(count > 1 for count in held.values()))
        assert stats.used + stats.cached + stats.free == self.num_blocks

    def read(self, name: str) -> npt.NDArray[np.int32]:
        if not self.cache.num_tokens(name):
            return np.empty(0, np.int32)
        return self.memory[self.cache.block_ids(name)].ravel()[: self.cache.num_tokens(name)]

    def references(self) -> Counter[int]:
        names = (name for name in self.tokens if self.cache.num_tokens(name))
        return Counter(block_id for name in names for block_id in self.cache.block_ids(name).tolist())

    # Choices

    def pick(self) -> str | None:
        return self.rng.choice(list(self.tokens)) if self.tokens else None

    def prompt(self) -> tuple[str, list[int]]:
        """A text like one seen before, sometimes of another tenant, with a new end."""
        tenant, text = self.rng.choice(self.texts)
        if self.rng.random() < 0.1:
            tenant = self.rng.choice(TENANTS)
        kept = self.rng.choice([len(text), self.rng.randint(0, len(text))])
        return tenant, [*text[:kept], *(self.rng.randrange(2) for _ in range(self.rng.randint(1, 4)))]

    def new_name(self) -> str:
        if len(self.tokens) == self.max_sequences:
            self.release()
        self.num_started += 1
        return f"s{self.num_started}"

    def end(self, name: str) -> None:
        self.texts = [*self.texts[-50:], (self.tenants.pop(name), self.tokens.pop(name))]
        del self.num_published[name]

    def whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.block_size


@pytest.mark.parametrize("num_blocks", POOLS)
def test_random_use_never_mixes_up_tokens_and_never_gives_a_stale_hit(num_blocks: int, size: Size) -> None:
    num_rounds = 6
    seen: Counter[str] = Counter()
    for seed in range(num_rounds):
        simulation = Simulation(num_blocks, seed)
        simulation.run(size(5_000, 108_000) // len(POOLS) // num_rounds)
        seen += simulation.seen
        seen["evictions"] += simulation.cache.stats().evictions
        for name in list(simulation.tokens):
            simulation.cache.release(name)
        assert simulation.cache.num_free == num_blocks
        assert len(simulation.cache.reclaim(drop_cached=True)) + len(simulation.returned) == num_blocks
    assert all(seen[event] > 0 for event in EVENTS), f"not everything came up: {seen}"
