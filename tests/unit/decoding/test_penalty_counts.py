"""Tokens the penalties look at, against a recount."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvarn.decoding.penalty_counts import PenaltyCounts

texts = st.lists(st.integers(0, 400), max_size=60)


def recount(prompt: list[int], answer: list[int], window: int | None) -> dict[int, int]:
    text = prompt + answer
    first = 0 if window is None else max(0, len(text) - window)
    counts = Counter(text[max(first, len(prompt)) :])
    return {token: counts[token] for token in text[first:]}


@given(texts, texts, st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 5))
def test_a_window_that_moves_holds_what_a_recount_finds(
    prompt: list[int], answer: list[int], window: int | None, stride: int
) -> None:
    counts_so_far = PenaltyCounts(prompt, window)
    for end in [*range(0, len(answer), stride), len(answer)]:
        counts_so_far.update(prompt + answer[:end])
        found = dict(zip(counts_so_far.ids.tolist(), counts_so_far.counts.tolist(), strict=True))
        assert found == recount(prompt, answer[:end], window)
        assert len(counts_so_far.ids) == len(found)


def test_more_tokens_than_there_was_room_for_are_kept() -> None:
    counts_so_far = PenaltyCounts(range(1000))
    counts_so_far.update([*range(1000), 999, 5, 2000])
    found = dict(zip(counts_so_far.ids.tolist(), counts_so_far.counts.tolist(), strict=True))
    assert found == dict.fromkeys(range(1000), 0) | {999: 1, 5: 1, 2000: 1}


def test_what_was_handed_out_does_not_change_later() -> None:
    counts_so_far = PenaltyCounts([1, 2], window=2)
    ids, counts = counts_so_far.ids, counts_so_far.counts
    counts_so_far.update([1, 2, 3, 3])
    assert (ids.tolist(), counts.tolist()) == ([1, 2], [0, 0])
