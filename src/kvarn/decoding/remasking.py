"""Which masked positions a step fills: pure functions behind a registry, from confidences to bits.

Equal confidences go to the lower position. Every policy fills at least one position, so every block comes to its end;
`origin`, which draws at random, fills what is left in its last step. Confidences are of the softmax of the raw logits,
before bias, temperature and noise. threshold, factor: Wu et al. 2025 (arXiv 2505.22618).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Schedule = Literal["even", "timesteps", "least"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The masked positions of a block, ascending, and the statistics of the token sampled at each."""

    positions: npt.NDArray[np.intp]
    confidences: Float64  # probability of the sampled token
    entropies: Float64  # nats
    margins: Float64  # probability of the best token less that of the second; only where a policy needs it
    noise: Float64  # uniform in [0, 1); only where a policy is random
    count: int  # positions that the schedule fills
    share: float  # of the masked positions, for random policies


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """The fields of DiffusionParams that policies read; those that the one in use does not read are 0."""

    threshold: float = 0.0
    factor: float = 0.0
    entropy_threshold: float = 0.0
    relaxed_threshold: float = 0.0
    radius: float = 0
    low_threshold: float = 0.0
    edit_threshold: float = 0.0
    max_post_edit_steps: float = 0
    alg_temp: float = 0.0


Choose = Callable[[Candidates, PolicyValues], Bits]


@dataclass(frozen=True, slots=True)
class RemaskingRule:
    """A policy: how it chooses, how its schedule counts, and which inputs it needs.

    even, timesteps: as schedules.py says. least: at least the even count where steps are given, else at least one.
    """

    choose: Choose
    schedule: Schedule
    needs_margin: bool = False
    is_random: bool = False
    edits: bool = False  # filled positions of the block may change


def best(values: Float64, count: int) -> Bits:
    """The count largest values; ties to the lower position."""
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def low_confidence(candidates: Candidates, values: PolicyValues) -> Bits:
    """The most probable tokens first."""
    return _ranked(candidates.confidences, candidates, values)


def random(candidates: Candidates, _: PolicyValues) -> Bits:
    """Any positions."""
    return best(candidates.noise, candidates.count)


def origin(candidates: Candidates, _: PolicyValues) -> Bits:
    """Every masked position independently, with the probability that its schedule gives."""
    return candidates.noise < candidates.share


def topk_margin(candidates: Candidates, values: PolicyValues) -> Bits:
    """The positions with the largest margin of the best token over the second."""
    return _ranked(candidates.margins, candidates, values)


def entropy(candidates: Candidates, values: PolicyValues) -> Bits:
    """The positions with the least entropy."""
    return _ranked(-candidates.entropies, candidates, values)


def threshold(candidates: Candidates, values: PolicyValues) -> Bits:
    """Every position above the confidence threshold."""
    return (candidates.confidences >= values.threshold) | best(candidates.confidences, candidates.count)


def factor(candidates: Candidates, values: PolicyValues) -> Bits:
    """The n most confident, for the largest n whose n-th reaches 1 - factor / (n + 1)."""
    ordered = -np.sort(-candidates.confidences)
    reached = np.flatnonzero(ordered >= 1 - values.factor / (np.arange(len(ordered)) + 2))
    return best(candidates.confidences, max(candidates.count, int(reached[-1]) + 1 if len(reached) else 0))


def entropy_exit(candidates: Candidates, values: PolicyValues) -> Bits:
    """Every position below the entropy threshold."""
    return (candidates.entropies < values.entropy_threshold) | best(-candidates.entropies, candidates.count)


def local_leap(candidates: Candidates, values: PolicyValues) -> Bits:
    """Positions above the threshold, and those near them above a lower one."""
    is_anchor = candidates.confidences >= values.threshold
    distance = np.abs(candidates.positions[:, None] - candidates.positions[is_anchor])  # (candidates, anchors)
    is_near = (distance <= values.radius).any(axis=1)
    is_enough: Bits = is_anchor | (is_near & (candidates.confidences >= values.relaxed_threshold))
    return is_enough | best(candidates.confidences, candidates.count)


def hierarchy(candidates: Candidates, values: PolicyValues) -> Bits:
    """The most confident position of every run of masked ones, halving it; and all above the threshold."""
    chosen = (candidates.confidences > values.threshold) | best(candidates.confidences, candidates.count)
    first_of_run = np.flatnonzero(np.diff(candidates.positions, prepend=-2) != 1)
    for run in np.split(np.arange(len(candidates.positions)), first_of_run[1:]):
        top = run[np.argmax(candidates.confidences[run])]
        chosen[top] |= candidates.confidences[top] > values.low_threshold
    return chosen


RULES: dict[str, RemaskingRule] = {
    "low_confidence": RemaskingRule(low_confidence, "even"),
    "random": RemaskingRule(random, "even", is_random=True),
    "origin": RemaskingRule(origin, "timesteps", is_random=True),
    "maskgit_plus": RemaskingRule(low_confidence, "timesteps"),
    "topk_margin": RemaskingRule(topk_margin, "timesteps", needs_margin=True),
    "entropy": RemaskingRule(entropy, "timesteps"),
    "threshold": RemaskingRule(threshold, "least"),
    "factor": RemaskingRule(factor, "least"),
    "entropy_exit": RemaskingRule(entropy_exit, "least"),
    "local_leap": RemaskingRule(local_leap, "least"),
    "hierarchy": RemaskingRule(hierarchy, "least"),
    "joint_threshold": RemaskingRule(threshold, "least", edits=True),
}


def positions_to_edit(confidences: Float64, is_other: Bits, values: PolicyValues) -> Bits:
    """Filled positions whose most probable token is now another one, above edit_threshold."""
    return is_other & (confidences > values.edit_threshold)


def _ranked(scores: Float64, candidates: Candidates, values: PolicyValues) -> Bits:
    """The best positions; with alg_temp drawn without replacement from softmax(scores / alg_temp)."""
    if values.alg_temp == 0:
        return best(scores, candidates.count)
    # The largest of log-probability + Gumbel noise are such a draw (Kool et al., ICML 2019).
    gumbel = -np.log(-np.log(np.clip(candidates.noise, 2.0**-53, 1 - 2.0**-53)))
    return best(scores / values.alg_temp + gumbel, candidates.count)
