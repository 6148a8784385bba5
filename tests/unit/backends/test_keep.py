"""Which keys sparse diffusion keeps, worked out by hand, and what a query sees under each mask."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.batch import Keep
from kvarn.backends.reference.attention import visible
from kvarn.backends.reference.keep import kept_slots, max_pool
from kvarn.models.spec import Attention, Mask

KEYS = np.array([[3, 0], [1, 1], [9, 9], [9, 9], [0, 2], [2, 0], [0, 4]], np.float32)  # (slots, KV heads)


def kept(num_kept: int, *, per_head: bool = True, pool_kernel: int = 1, q: float = 1.0) -> list[list[int]]:
    """One dimension, two KV heads, one query head each; slots 2 and 3 are the block."""
    keep = Keep(0, 2, 4, num_kept, np.zeros(1, np.int32), per_head, pool_kernel)
    queries = np.array([[[q], [q]], [[3 * q], [3 * q]]], np.float32)
    found: list[list[int]] = kept_slots(keep, queries, KEYS[:, :, None], scale=0.5).tolist()
    return found


def test_each_head_keeps_its_largest_in_order_of_position() -> None:
    assert kept(2) == [[0, 5], [4, 6]]


def test_all_heads_keep_the_same_by_the_sum_of_their_scores() -> None:
    assert kept(2, per_head=False) == [[0, 6], [0, 6]]  # sums 3, 2, 2, 2, 4


def test_equal_scores_go_to_the_lower_position() -> None:
    assert kept(3, per_head=False) == [[0, 1, 6], [0, 1, 6]]


def test_neighbours_share_the_largest_score_across_the_block() -> None:
    """Outside keys of the first head in order: 3 1 | 0 2 0, pooled by three: 3 3 2 2 2."""
    assert kept(3, pool_kernel=3)[0] == [0, 1, 4]
    assert max_pool(np.array([[3, 1, 0, 2, 0]], np.float32), 3).tolist() == [[3, 3, 2, 2, 2]]


def test_a_negative_query_turns_the_order_round() -> None:
    assert kept(2, q=-1.0) == [[4, 6], [0, 5]]


def test_a_key_counts_for_the_query_head_that_wants_it_most() -> None:
    keep = Keep(0, 2, 4, 1, np.zeros(1, np.int32), True, 1)
    queries = np.array([[[0.1], [1.0], [-1.0], [0.1]]] * 2, np.float32)  # two query heads for each KV head
    keys = np.stack([KEYS[:, 0], np.array([1, -5, 9, 9, 3, 2, 0], np.float32)], axis=1)[:, :, None]
    assert kept_slots(keep, queries, keys, scale=1.0).tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("mask", "shift", "expected"),
    [
        ("causal", 0, ["111110", "111111"]),
        ("causal", 2, ["111000", "111100"]),
        ("bidirectional", 2, ["111111", "111111"]),
        ("block_causal", 0, ["111111", "111111"]),
        ("block_causal", 2, ["111100", "111100"]),
    ],
)
def test_a_query_sees_what_its_mask_says(mask: Mask, shift: int, expected: list[str]) -> None:
    attention = Attention(1, 1, 8, 1.0, None, mask=mask, mask_block=3 if mask == "block_causal" else None)
    seen = visible(np.array([4, 5], np.int32), 6, attention, shift)
    assert ["".join(str(int(s)) for s in row) for row in seen] == expected
