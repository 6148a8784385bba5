"""Recurrent states beside the blocks: who reads and writes which slot, snapshots, and what happens without room."""

from __future__ import annotations

import random

import pytest

from kvarn.kv.cache import KVCache
from kvarn.kv.states import NO_STATE
from tests.conftest import Size

SIZE = 4
TEXT = list(range(100, 140))


def cache(num_states: int = 16, num_blocks: int = 64) -> KVCache:
    return KVCache(num_blocks, SIZE, num_states=num_states)


def compute(kv: KVCache, name: str, text: list[int], *steps: int) -> None:
    """Take steps of so many tokens, each computed and published."""
    for count in steps:
        assert kv.extend(name, count) is not None
        kv.publish(name, text, num_computed=kv.num_tokens(name), is_decoding=count == 1)
        kv.check()


def test_a_step_reads_what_the_one_before_wrote_and_writes_another_slot() -> None:
    kv = cache()
    assert kv.states is not None
    compute(kv, "a", TEXT, 5)
    first = kv.states.state_of("a")
    assert first.read == NO_STATE
    written = first.written
    compute(kv, "a", TEXT, 3)
    second = kv.states.state_of("a")
    assert (second.read, second.start, second.end) == (written, 5, 8)
    assert second.written != written


def test_a_step_that_failed_is_taken_again_from_the_same_state() -> None:
    kv = cache()
    assert kv.states is not None
    compute(kv, "a", TEXT, 5)
    kv.extend("a", 3)
    before = kv.states.state_of("a").read
    kv.trim("a", 5)
    kv.extend("a", 2)
    state = kv.states.state_of("a")
    assert (state.read, state.start, state.end) == (before, 5, 7)
    kv.check()


def test_a_snapshot_that_an_undone_step_would_have_made_is_never_found() -> None:
    kv = cache()
    assert kv.states is not None
    kv.extend("a", 10)  # would leave a state behind 8 tokens
    kv.trim("a", 0)
    compute(kv, "a", TEXT, 8)
    written = kv.states.state_of("a").written
    kv.fork("b", kv.lookup(TEXT[:9]))
    kv.extend("b", 1)
    assert kv.states.state_of("b").read == written
    kv.check()


def test_prompts_in_steps_of_one_block_leave_snapshots_for_others() -> None:
    kv = cache(num_states=40)
    for _ in range(8):
        kv.extend("a", SIZE)
        kv.publish("a", TEXT, num_computed=kv.num_tokens("a"))
    kv.release("a")
    assert kv.lookup([*TEXT[:12], 7, 7]).num_tokens == 12


def test_a_prefix_is_found_up_to_its_last_snapshot_and_the_next_to_come_by_finds_more() -> None:
    kv = cache()
    assert kv.states is not None
    compute(kv, "a", TEXT, 30)  # leaves a state behind 28 tokens
    kv.release("a")
    fork_at_12 = TEXT[:14] + [7] * 10
    hit = kv.lookup(fork_at_12)
    assert (hit.num_tokens, hit.num_matched) == (0, 12)
    kv.fork("b", hit)
    compute(kv, "b", fork_at_12, 24)
    kv.release("b")
    assert kv.lookup(TEXT[:14] + [8] * 10).num_tokens == 12
    same = kv.lookup(TEXT[:30])
    assert same.num_tokens == 28
    kv.fork("c", same)
    kv.extend("c", 2)
    state = kv.states.state_of("c")
    assert (state.start, state.end) == (28, 30)
    assert state.read not in (NO_STATE, state.written)
    kv.check()


def test_while_it_decodes_a_sequence_leaves_one_snapshot_at_its_last_full_block() -> None:
    kv = cache()
    compute(kv, "a", TEXT, 10, *[1] * 14)
    kv.release("a")
    kv.check()
    assert kv.lookup(TEXT[:25]).num_tokens == 24
    assert kv.lookup(TEXT[:24]).num_tokens == 8  # that of the prompt: the last token is always left to compute


def test_a_snapshot_in_use_outlives_its_block() -> None:
    kv = cache(num_states=8, num_blocks=8)
    assert kv.states is not None
    compute(kv, "a", TEXT, 9)
    kv.release("a")
    kv.fork("b", kv.lookup(TEXT[:12]))
    kv.extend("b", 1)
    read = kv.states.state_of("b").read
    kv.reclaim(drop_cached=True)
    for name in "xyz"[: kv.states.max_sequences - 1]:
        compute(kv, name, [ord(name)] * 8, 8)
    assert read not in {slot for name in "xyz" if kv.num_tokens(name) for slot in kv.states.state_of(name).slots()}
    kv.check()


@pytest.mark.parametrize("num_states", [4, 5, 8, 40])
def test_random_sequences_always_find_a_slot(num_states: int, size: Size) -> None:
    """And what a sequence reads holds the state behind exactly its tokens, whoever wrote it."""
    rng = random.Random(num_states)
    kv = cache(num_states)
    assert kv.states is not None
    memory: dict[int, tuple[int, ...]] = {}
    texts: dict[str, list[int]] = {}
    num_hits = 0
    for turn in range(size(600, 20_000)):
        if len(texts) < kv.states.max_sequences and rng.random() < 0.4:
            name = f"s{turn}"
            texts[name] = [rng.randrange(2) for _ in range(rng.randint(1, 4) * 6)] + [9] * 30
            hit = kv.lookup(texts[name])
            num_hits += hit.num_tokens > 0
            if hit.num_matched:
                kv.fork(name, hit)
        elif texts:
            name = rng.choice(list(texts))
            start = kv.num_tokens(name)
            end = min(start + rng.choice([1, 1, 1, 2, 7, 13]), len(texts[name]))
            if end == start or rng.random() < 0.1:
                kv.release(name, unpublish=rng.random() < 0.3)
                del texts[name]
                continue
            if kv.extend(name, end - start) is None:
                kv.release(name)
                del texts[name]
                continue
            step(kv, name, texts[name], memory)
            if rng.random() < 0.1:
                kv.trim(name, start)
            else:
                kv.publish(name, texts[name], num_computed=end)
        kv.check()
    assert num_hits > 0 or num_states <= 5


def step(kv: KVCache, name: str, text: list[int], memory: dict[int, tuple[int, ...]]) -> None:
    """Compute as a backend does: a state is all tokens before it."""
    assert kv.states is not None
    state = kv.states.state_of(name)
    held = () if state.read == NO_STATE else memory[state.read]
    assert held == tuple(text[: state.start])
    for row, slot in state.saved_rows():
        memory[slot] = tuple(text[: state.start + row + 1])
    memory[state.written] = tuple(text[: state.end])
