"""Custom samplers: a registry by name, filled by register_sampler. docs/adding-a-sampler.md shows one.

A sampler is a function sampler(logits, token_ids, draw) -> token id:
    logits     float32 (vocabulary), with bias and penalties applied, before temperature; yours to change.
               -inf: choosing that token is an error; no token has this id, or the constraint does not allow it
    token_ids  prompt and answer so far
    draw()     the next of the random numbers in [0, 1) that belong to this request's seed and this position
With these it gives the same token whenever the request is run again, whatever else is in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.errors import ConfigError, InvalidParameter
from kvarn.sampling.philox import USER_SAMPLER, uniform
from kvarn.sampling.sampler import SamplingRow, apply_penalties
from kvarn.sampling.token_masks import is_allowed

Float32 = npt.NDArray[np.float32]
Draw = Callable[[], float]
SamplerFunction = Callable[[Float32, Sequence[int], Draw], int]

MAX_NAME = 64

_samplers: dict[str, SamplerFunction] = {}


def register_sampler(name: str, function: SamplerFunction) -> None:
    """Make a sampler available as SamplingParams(sampler=name); a second one of that name takes its place."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise ConfigError(f"the name of a sampler is {short(name)}; give a string of 1 to {MAX_NAME} characters")
    if not callable(function):
        raise ConfigError(
            f"sampler {name!r} is {short(function)}; give a function (logits, token_ids, draw) -> token id"
        )
    _samplers[name] = function


def find_sampler(name: str) -> SamplerFunction:
    """The sampler of that name, or a refusal that names the known ones."""
    if name not in _samplers:
        known = ", ".join(sorted(_samplers)) or "none"
        raise InvalidParameter(
            f"sampler is {short(name)}; registered with kvarn.register_sampler: {known}", field="sampler"
        )
    return _samplers[name]


def run_sampler(function: SamplerFunction, logits: Float32, row: SamplingRow, token_ids: Sequence[int]) -> int:
    """Call a custom sampler and check what it returns."""
    purposes = itertools.count(USER_SAMPLER)

    def draw() -> float:
        return uniform(row.seed, row.position, row.choice, next(purposes), row.draw)

    token_id = function(apply_penalties(logits, row), tuple(token_ids), draw)
    if not isinstance(token_id, int | np.integer) or not 0 <= token_id < len(logits):
        raise ValueError(f"it returned {short(token_id)}, not a token id below {len(logits)}")
    if row.mask is not None and not is_allowed(row.mask, int(token_id)):
        raise ValueError(
            f"it returned the id {token_id}, which no token has or the constraint does not allow (its logit was -inf)"
        )
    return int(token_id)
