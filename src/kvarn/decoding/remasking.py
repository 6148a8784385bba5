"""Which masked positions a step fills: pure functions behind a registry, from confidences to bits.

Equal confidences go to the lower position. Every policy fills at least one position, so every block comes to its end;
`origin`, which draws lots, fills what is left in its last step. Confidences are of the clean softmax of the logits,
before bias, temperature and noise. threshold, factor: Wu et al. 2025 (arXiv 2505.22618).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvarn.diffusion import DiffusionParams

Bits = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Schedule = Literal["even", "timesteps", "least"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The masked positions of a block, ascending, and what the model says about each."""

    positions: npt.NDArray[np.intp]
    confidences: Float64  # probability of the chosen token
    entropies: Float64  # nats
    margins: Float64  # probability of the first choice less that of the second; only where a policy looks at it
    noise: Float64  # uniform in [0, 1); only where a policy draws lots
    count: int  # that the schedule asks for
    share: float  # of the masked positions, for lots


Choose = Callable[[Candidates, DiffusionParams], Bits]


@dataclass(frozen=True, slots=True)
class RemaskingRule:
    """A policy: how it chooses, how its schedule counts, and what it looks at.

    even, timesteps: as schedules.py says. least: at least the even count where steps are given, else at least one.
    """

    choose: Choose
    schedule: Schedule
    sees_margin: bool = False
    draws_lots: bool = False
    edits: bool = False  # filled positions of the block may change


def best(values: Float64, count: int) -> Bits:
    """The count largest values; ties to the lower position."""
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def low_confidence(seen: Candidates, params: DiffusionParams) -> Bits:
    """The most probable tokens first."""
    return _ranked(seen.confidences, seen, params)


def random(seen: Candidates, _: DiffusionParams) -> Bits:
    """Any positions."""
    return best(seen.noise, seen.count)


def origin(seen: Candidates, _: DiffusionParams) -> Bits:
    """Every masked position on its own, with the chance that its schedule gives."""
    return seen.noise < seen.share


def topk_margin(seen: Candidates, params: DiffusionParams) -> Bits:
    """The positions whose first choice is furthest ahead of the second."""
    return _ranked(seen.margins, seen, params)


def entropy(seen: Candidates, params: DiffusionParams) -> Bits:
    """The positions with the least entropy."""
    return _ranked(-seen.entropies, seen, params)


def threshold(seen: Candidates, params: DiffusionParams) -> Bits:
    """Every position that is sure enough."""
    return (seen.confidences >= params.threshold) | best(seen.confidences, seen.count)


def factor(seen: Candidates, params: DiffusionParams) -> Bits:
    """The n surest, for the largest n whose n-th reaches 1 - factor / (n + 1)."""
    ordered = -np.sort(-seen.confidences)
    reached = np.flatnonzero(ordered >= 1 - params.factor / (np.arange(len(ordered)) + 2))
    return best(seen.confidences, max(seen.count, int(reached[-1]) + 1 if len(reached) else 0))


def entropy_exit(seen: Candidates, params: DiffusionParams) -> Bits:
    """Every position with little entropy."""
    return (seen.entropies < params.entropy_threshold) | best(-seen.entropies, seen.count)


def local_leap(seen: Candidates, params: DiffusionParams) -> Bits:
    """Sure positions, and less sure ones near them."""
    is_anchor = seen.confidences >= params.threshold
    distance = np.abs(seen.positions[:, None] - seen.positions[is_anchor])  # (candidates, anchors)
    is_near = (distance <= params.radius).any(axis=1)
    is_enough: Bits = is_anchor | (is_near & (seen.confidences >= params.relaxed_threshold))
    return is_enough | best(seen.confidences, seen.count)


def hierarchy(seen: Candidates, params: DiffusionParams) -> Bits:
    """The surest position of every run of masked ones, halving it; and all that are sure enough."""
    chosen = (seen.confidences > params.threshold) | best(seen.confidences, seen.count)
    first_of_run = np.flatnonzero(np.diff(seen.positions, prepend=-2) != 1)
    for run in np.split(np.arange(len(seen.positions)), first_of_run[1:]):
        top = run[np.argmax(seen.confidences[run])]
        chosen[top] |= seen.confidences[top] > params.low_threshold
    return chosen


RULES: dict[str, RemaskingRule] = {
    "low_confidence": RemaskingRule(low_confidence, "even"),
    "random": RemaskingRule(random, "even", draws_lots=True),
    "origin": RemaskingRule(origin, "timesteps", draws_lots=True),
    "maskgit_plus": RemaskingRule(low_confidence, "timesteps"),
    "topk_margin": RemaskingRule(topk_margin, "timesteps", sees_margin=True),
    "entropy": RemaskingRule(entropy, "timesteps"),
    "threshold": RemaskingRule(threshold, "least"),
    "factor": RemaskingRule(factor, "least"),
    "entropy_exit": RemaskingRule(entropy_exit, "least"),
    "local_leap": RemaskingRule(local_leap, "least"),
    "hierarchy": RemaskingRule(hierarchy, "least"),
    "joint_threshold": RemaskingRule(threshold, "least", edits=True),
}


def edited(confidences: Float64, is_other: Bits, params: DiffusionParams) -> Bits:
    """Filled positions whose token is now another one, and surely so."""
    return is_other & (confidences >= params.edit_threshold)


def _ranked(values: Float64, seen: Candidates, params: DiffusionParams) -> Bits:
    """The best positions; with alg_temp drawn without replacement from softmax(values / alg_temp)."""
    if params.alg_temp == 0:
        return best(values, seen.count)
    # The largest of log-probability + Gumbel noise are such a draw (Kool et al., ICML 2019).
    gumbel = -np.log(-np.log(np.clip(seen.noise, 2.0**-53, 1 - 2.0**-53)))
    return best(values / params.alg_temp + gumbel, seen.count)
