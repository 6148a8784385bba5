"""The counter-based generator against published answers."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.sampling.philox import Words, philox, uniform


# Known-answer vectors of Random123 (philox4x32, 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: Words, key: tuple[int, int], answer: Words) -> None:
    assert philox(counter, key) == answer


def test_uniform_uses_53_bits_of_the_first_two_words() -> None:
    assert uniform(0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_the_high_half_of_the_seed_counts() -> None:
    assert uniform(1, 0, 0) != uniform(1 + 2**32, 0, 0)


def test_draws_are_even_and_differ_by_position_and_choice() -> None:
    draws = np.array([[uniform(7, position, choice) for choice in range(4)] for position in range(1000)])
    assert len(np.unique(draws)) == draws.size
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert np.abs(counts - 400).max() < 100  # five standard deviations
