"""Denoising state of one running request: its canvas, the block being denoised, and the step of its schedule.

All of it follows from the request's tokens at the start of a block, so a preempted request is rebuilt from them with
the same result. Random numbers are keyed by seed, choice, position and the step within the block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from kvarn.backends.batch import Int32, Sampled
from kvarn.decoding.canvas import Canvas, CanvasBlock, CanvasShape, Positions
from kvarn.decoding.decoder import CommittedToken
from kvarn.decoding.denoise_config import DenoiseConfig
from kvarn.decoding.logprobs import sampled_logprob
from kvarn.decoding.remasking import Bits, Candidates, Float64, positions_to_edit
from kvarn.decoding.schedules import (
    even_count,
    first_filling_step,
    steps_of_block,
    timestep_count,
    transfer_share,
)
from kvarn.decoding.slots import CanvasSlots
from kvarn.diffusion import CanvasView
from kvarn.request import Request
from kvarn.sampling.philox import REMASKING, uniform
from kvarn.types import TokenLogprob

MAX_SKIPPED = 64  # steps of a random policy that fill nothing, skipped at a time


@dataclass(frozen=True, slots=True)
class Filling:
    """What a step decided: these positions take these tokens."""

    positions: Positions
    token_ids: Int32
    logprobs: tuple[TokenLogprob, ...] = ()  # for requests that want them


class DenoiseState:
    """The state of one request between two steps."""

    def __init__(
        self, request: Request, config: DenoiseConfig, shape: CanvasShape, mask_id: int, stop_ids: Collection[int] = ()
    ) -> None:
        """stop_ids: tokens that end an answer."""
        pinned = {shape.num_prompt + index: token_id for index, token_id in config.params.pinned_ids.items()}
        self.config = config
        self.canvas = Canvas(shape, request.token_ids, mask_id, pinned)
        self.slots = CanvasSlots(request.slots, self.canvas)
        self.num_passes = 0  # forward passes of this block
        self.step = 0  # of this block's schedule
        self._request = request
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._num_steps_reported = 0
        self._enter_block()

    @property
    def length(self) -> int:
        """Of the part of the canvas that the model sees now."""
        return self.canvas.shape.length if self.config.is_fixed else self.block.end

    def candidates(self) -> Positions:
        """Positions whose logits this step needs, ascending."""
        masked = self.slots.fillable(self.canvas.masked_in(self.part))
        if self.is_first_alone:
            return masked[:1]
        if not self.config.rule.edits:
            return masked
        return np.sort(np.concatenate([masked, self._editable()]))

    @property
    def active_part(self) -> CanvasBlock | None:
        """The part of the block that this step computes alone; None: as much as the cache wants."""
        is_cached = self.config.cache == "sub_block" and self._num_part_passes > 0
        return self.part if is_cached else None

    @property
    def is_first_alone(self) -> bool:
        """Whether this step fills the first position of the block and nothing else."""
        return self.config.first_alone and bool(self.canvas.is_masked[self.block.start])

    def decide(self, sampled: Sampled) -> Filling:
        """Choose the positions to fill; sampled has a row per candidate. Changes nothing."""
        positions = self.candidates()
        is_masked = self.canvas.is_masked[positions]
        confidences = np.exp(sampled.logprobs.astype(np.float64))
        chosen = self.slots.contain(positions)  # a slot is written from left to right, whatever the policy
        is_free = is_masked & ~chosen
        if is_free.any():
            candidates = self._masked_candidates(positions[is_free], confidences[is_free], sampled, is_free)
            chosen[is_free] = self.is_first_alone or self.config.rule.choose(candidates, self.config.values)
        if self.config.rule.edits:
            is_other = ~is_masked & (sampled.token_ids != self.canvas.token_ids[positions])
            chosen |= positions_to_edit(confidences, is_other, self.config.values)
        rows = np.flatnonzero(chosen)
        num_top = self._request.params.logprobs
        logprobs = () if num_top is None else tuple(sampled_logprob(sampled, int(row), num_top) for row in rows)
        return Filling(positions[rows], self.slots.settled(positions[rows], sampled.token_ids[rows]), logprobs)

    def apply(self, filling: Filling) -> tuple[CommittedToken, ...]:
        """Fill the canvas; returns, at the end of a block, its tokens and those already known after it."""
        was_filled, was_first = not len(self.canvas.masked_in(self.block)), self.is_first_alone
        self.canvas.fill(filling.positions, filling.token_ids)
        self.slots.take(filling.positions, filling.token_ids)
        for position, logprob in zip(filling.positions.tolist(), filling.logprobs, strict=False):
            self.canvas.logprobs[position] = logprob
        self.num_passes += 1
        self._num_steps_reported += 1
        needed_end = self._needed_end()
        if (self.canvas.masked_in(self.block) < needed_end).any():
            if was_first or not len(self.canvas.masked_in(self.part)):
                self._enter_part()  # the first position alone is no step of the schedule
            else:
                self._num_part_passes += 1
                self._advance_to(self.step + 1)
            return ()
        self._num_edit_passes += was_filled
        if self.config.rule.edits and self._keeps_editing(is_changed=not was_filled or len(filling.positions) > 0):
            self._advance_to(self.step + 1)
            return ()
        start = len(self._request.token_ids)
        end = needed_end if needed_end < self.block.end else self._enter_block()
        logprobs = self.canvas.logprobs
        return tuple(CommittedToken(int(self.canvas.token_ids[p]), logprobs.get(p)) for p in range(start, end))

    def view(self) -> CanvasView:
        first = self.canvas.shape.num_prompt
        answer = self.canvas.answer(self.length)
        return CanvasView(answer, max(0, self.block.start - first), self.block.end - first, self._num_steps_reported)

    def _editable(self) -> Positions:
        """Positions of the block whose tokens may change."""
        written = self.slots.outside(self.canvas.written_in(self.block))
        # The logits of the first position are those it was chosen by.
        return written[written != self.block.start] if self.config.first_alone else written

    def _keeps_editing(self, *, is_changed: bool) -> bool:
        """A full block is edited until a pass changes nothing, or max_post_edit_steps of them are done."""
        is_due = is_changed and self._num_edit_passes < self.config.values.max_post_edit_steps
        return is_due and len(self._editable()) > 0

    def _needed_end(self) -> int:
        """Where the part of the block ends that is read: at its end, the answer's, or after a stop token.

        Positions after it would be dropped, so they are not waited for; unless tokens before it may still be edited.
        """
        start, end = self.block.start, self.block.end
        if self.config.rule.edits:
            return end
        end = min(end, self._request.max_total_tokens)
        if not len(self._stop_ids):
            return end
        first = max(start, self.canvas.shape.num_prompt + self._request.params.min_tokens)
        is_stop = np.isin(self.canvas.token_ids[first:end], self._stop_ids) & ~self.canvas.is_masked[first:end]
        return first + int(np.argmax(is_stop)) + 1 if is_stop.any() else end

    def _enter_block(self) -> int:
        """Begin the first block that has masked positions; returns where the known text before it ends."""
        masked = np.flatnonzero(self.canvas.is_masked)
        shape = self.canvas.shape
        if not len(masked):
            return shape.length
        self.block: CanvasBlock = shape.block_of(int(masked[0]))
        self.num_passes = 0
        self._num_edit_passes = 0  # of them, those that began with a full block
        self._enter_part()
        return max(self.block.start, len(self._request.token_ids))

    def _enter_part(self) -> None:
        """Begin the first part of the block that has masked positions; schedules are those of parts."""
        length, start = self.config.sub_block_length, self.block.start
        offset = (int(self.canvas.masked_in(self.block)[0]) - start) // length
        index = self.block.index * (self.config.block_length // length) + offset
        end = min(start + (offset + 1) * length, self.block.end)
        self.part = CanvasBlock(index, start + offset * length, end)
        self._num_masked = len(self.canvas.masked_in(self.part))
        self._num_part_passes = 0
        self._advance_to(0)

    def _advance_to(self, step: int) -> None:
        """Go to the next step that fills something; one that fills nothing need not be computed."""
        self.step = step
        if self.config.rule.schedule != "timesteps":
            return  # every step fills something until nothing is left
        masked, num_steps = self.canvas.masked_in(self.part), self._num_steps
        if not self.config.rule.is_random:
            self.step = first_filling_step(len(masked), num_steps, step)
            return
        # Bounded: a caller may ask for any number of steps, many may fill nothing, and other requests wait meanwhile.
        while self.step < step + MAX_SKIPPED and not (self._noise(masked) < self._share).any():
            self.step += 1

    @property
    def _num_steps(self) -> int:
        """Of this part of the canvas."""
        if self.config.params.steps is None:
            return self._num_masked
        num_parts = self.canvas.shape.num_blocks * (self.config.block_length // self.config.sub_block_length)
        return steps_of_block(self.config.params.steps, num_parts, self.part.index)

    @property
    def _share(self) -> float:
        return transfer_share(self._num_steps, self.step)

    @property
    def _count(self) -> int:
        """Positions the schedule fills in this step."""
        num_left = len(self.canvas.masked_in(self.part))
        if self.config.rule.schedule == "timesteps":
            return timestep_count(num_left, self._num_steps, self.step)
        count = even_count(self._num_masked, self._num_steps, self.step)
        return min(num_left, max(1, count) if self.config.rule.schedule == "least" else count)

    def _masked_candidates(
        self, positions: Positions, confidences: Float64, sampled: Sampled, is_masked: Bits
    ) -> Candidates:
        rule, none = self.config.rule, np.empty(0)
        needs_noise = rule.is_random or self.config.values.alg_temp > 0
        tops = np.exp(sampled.top_logprobs[is_masked].astype(np.float64)) if rule.needs_margin else none
        return Candidates(
            positions=positions,
            confidences=confidences,
            entropies=sampled.entropy[is_masked].astype(np.float64),
            margins=tops[:, 0] - tops[:, 1] if rule.needs_margin else none,
            noise=self._noise(positions) if needs_noise else none,
            count=self._count,
            share=self._share if rule.schedule == "timesteps" else 1.0,
        )

    def _noise(self, positions: Positions) -> Float64:
        request, step = self._request, self.step
        seed = request.seed % 2**64
        return np.array([uniform(seed, p, request.choice, REMASKING, step) for p in positions.tolist()])
