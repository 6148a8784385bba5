"""Random numbers by counter: Philox 4x32-10 (Salmon et al., SC 2011). Stateless: the order of calls does not matter."""

from __future__ import annotations

from typing import Final

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
ROUNDS: Final = 10
MASK: Final = 0xFFFFFFFF

# Purposes
TOKEN_CHOICE: Final = 0  # which token comes next
XTC: Final = 1  # whether the most probable tokens are dropped
REMASKING: Final = 2**16  # which masked positions are filled
FIRST_CANVAS: Final = 2**16 + 1  # the random tokens that a canvas begins with
RENEWAL: Final = 2**16 + 2  # those that take the place of tokens that were not taken
USER_SAMPLER: Final = 2  # the first draw of a custom sampler; its further draws count up from here

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt a counter of four 32-bit words."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & MASK, (low >> 32) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int, purpose: int = TOKEN_CHOICE, draw: int = 0) -> float:
    """Draw the number in [0, 1) that belongs to a seed, a position, a choice, a purpose and a draw among several."""
    counter = (position & MASK, choice & MASK, purpose & MASK, draw & MASK)
    w0, w1, _, _ = philox(counter, (seed & MASK, (seed >> 32) & MASK))
    return ((w0 >> 5) * 67108864 + (w1 >> 6)) / 2.0**53
