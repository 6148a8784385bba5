"""The canvas of random tokens that one running request denoises, and when it is done.

All of it follows from the request's tokens where the canvas begins, so a preempted request begins its canvas again with
the same result. Random numbers are keyed by seed, choice, position and step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import CanvasScores, Feedback, Int32
from kvarn.diffusion import CanvasView
from kvarn.models.diffusion.uniform import EntropyBound
from kvarn.request import Request
from kvarn.sampling.philox import FIRST_CANVAS, RENEWAL, uniform

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a step decided: the canvas that the next one reads, or the tokens of the answer if it was the last."""

    token_ids: Int32
    is_taken: Bits  # positions whose drawn token was taken
    scores: CanvasScores
    is_last: bool


class UniformState:
    """The state of one request between two steps."""

    def __init__(self, request: Request, schedule: EntropyBound, length: int, vocab_size: int) -> None:
        """length: of a canvas."""
        self.num_steps = 0  # of the request
        self._request = request
        self._schedule = schedule
        self._length = length
        self._vocab_size = vocab_size
        self.begin_canvas()

    def begin_canvas(self) -> None:
        """Start behind the request's tokens with random ones."""
        self.start = len(self._request.token_ids)
        self.step = 0
        self.token_ids = self._random_tokens(FIRST_CANVAS)
        self.feedback: Feedback | None = None
        self._best: deque[Int32] = deque(maxlen=self._schedule.stability)  # most probable tokens of the last steps
        self._taken: Renewal | None = None  # the last one

    @property
    def end(self) -> int:
        return self.start + self._length

    @property
    def temperature(self) -> float:
        """What the logits of this step are divided by."""
        schedule = self._schedule
        share = (schedule.max_steps - self.step) / schedule.max_steps
        return schedule.min_temperature + (schedule.max_temperature - schedule.min_temperature) * share

    def decide(self, drawn: Int32, scores: CanvasScores) -> Renewal:
        """Take the drawn tokens of the surest positions. Changes nothing."""
        is_taken = within_bound(scores.entropy, self._schedule.bound)
        is_stable = len(self._best) == self._schedule.stability and all(
            np.array_equal(best, scores.best_ids) for best in self._best
        )
        is_confident = float(np.mean(scores.entropy.astype(np.float64))) < self._schedule.confidence
        if (is_stable and is_confident) or self.step + 1 >= self._schedule.max_steps:
            return Renewal(scores.best_ids, is_taken, scores, is_last=True)
        return Renewal(np.where(is_taken, drawn, self._random_tokens(RENEWAL)), is_taken, scores, is_last=False)

    def apply(self, renewal: Renewal) -> None:
        self.token_ids, self.feedback, self._taken = renewal.token_ids, renewal.scores.feedback, renewal
        self._best.append(renewal.scores.best_ids)
        self.step += 1
        self.num_steps += 1

    def view(self) -> CanvasView:
        """The answer with the most probable tokens of the canvas, None where they were not taken."""
        assert self._taken is not None, "a step comes before a view"
        last, num_prompt = self._taken, self._request.num_prompt
        pairs = zip(last.scores.best_ids.tolist(), (last.is_taken | last.is_last).tolist(), strict=True)
        canvas = tuple(token_id if is_shown else None for token_id, is_shown in pairs)
        first = self.start - num_prompt
        answer = (*self._request.token_ids[num_prompt : self.start], *canvas)
        return CanvasView(answer, first, first + self._length, self.num_steps)

    def _random_tokens(self, purpose: int) -> Int32:
        seed, choice, size = self._request.seed % 2**64, self._request.choice, self._vocab_size
        positions = range(self.start, self.end)
        return np.array([int(uniform(seed, p, choice, purpose, self.step) * size) for p in positions], np.int32)


def within_bound(entropy: npt.NDArray[np.float32], bound: float) -> Bits:
    """The positions, the least entropy first and equal ones from left to right, before which it sums up to no more."""
    order = np.argsort(entropy, kind="stable")
    ascending = entropy[order].astype(np.float64)
    is_within = np.zeros(len(entropy), bool)
    is_within[order] = np.cumsum(ascending) - ascending <= bound
    return is_within
