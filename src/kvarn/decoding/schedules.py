"""How many positions a step fills: pure arithmetic.

even: a block's masked positions are split evenly over its steps, the larger shares first (Nie et al. 2025, arXiv
2502.09992). timesteps: time goes from 1 to LAST_TIME in equal strides, and a step fills the share of the masked
positions that leaves the noise of the next time (Ye et al. 2025, arXiv 2508.15487).
"""

from __future__ import annotations

from bisect import bisect_left

LAST_TIME = 1e-3  # of the published sampler


def steps_of_block(steps: int, num_blocks: int, index: int) -> int:
    """The share of the steps that block number index gets: an even split, the larger shares first, at least one."""
    return max(1, steps // num_blocks + (index < steps % num_blocks))


def even_count(num_masked: int, num_steps: int, step: int) -> int:
    """Positions filled in a step of the even schedule; num_masked is what the block began with."""
    return num_masked // num_steps + (step < num_masked % num_steps)


def transfer_share(num_steps: int, step: int) -> float:
    """The share of the masked positions filled in a step of the timestep schedule; all of them in the last."""
    if step >= num_steps - 1:
        return 1.0
    return 1.0 - _time(num_steps, step + 1) / _time(num_steps, step)


def timestep_count(num_left: int, num_steps: int, step: int) -> int:
    """Positions filled in a step of the timestep schedule; num_left are masked now."""
    return int(num_left * transfer_share(num_steps, step))


def first_filling_step(num_left: int, num_steps: int, step: int) -> int:
    """The first step from step on whose count is not 0; shares only grow from step to step."""
    later = range(step, num_steps)
    return step + bisect_left(later, True, key=lambda i: timestep_count(num_left, num_steps, i) > 0)


def _time(num_steps: int, step: int) -> float:
    return 1.0 + step * ((LAST_TIME - 1.0) / num_steps)
