"""The text a diffusion model fills in: tokens, which of them are still masked, and its blocks.

    | prompt | answer: filled | being denoised | masked ...            |
    0        num_prompt       block.start      block.end               length

Which positions are masked is kept beside the tokens, never found by looking for the mask token: prompts may hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvarn.types import TokenLogprob

Int32 = npt.NDArray[np.int32]
Bits = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class CanvasBlock:
    """Positions start .. end, denoised together."""

    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CanvasShape:
    """Where the blocks of a canvas begin and end."""

    num_prompt: int
    length: int  # of prompt and answer
    block_length: int
    is_aligned: bool = False  # blocks are counted from position 0, not from the end of the prompt

    @property
    def first_start(self) -> int:
        """Where the first block begins; an aligned one may begin within the prompt."""
        return self.num_prompt - self.num_prompt % self.block_length if self.is_aligned else self.num_prompt

    @property
    def num_blocks(self) -> int:
        return -(-(self.length - self.first_start) // self.block_length)

    def block_of(self, position: int) -> CanvasBlock:
        """The block a position of the answer lies in."""
        index = (position - self.first_start) // self.block_length
        start = self.first_start + index * self.block_length
        return CanvasBlock(index, start, min(start + self.block_length, self.length))


class Canvas:
    """Tokens and mask of one request."""

    def __init__(self, shape: CanvasShape, token_ids: Sequence[int], mask_id: int, pinned: Mapping[int, int]) -> None:
        """token_ids: the prompt and the known part of the answer. pinned: tokens by position."""
        self.shape = shape
        self.mask_id = mask_id
        self.token_ids: Int32 = np.full(shape.length, mask_id, np.int32)
        self.is_masked: Bits = np.ones(shape.length, bool)
        self.is_given: Bits = np.zeros(shape.length, bool)  # by the caller
        self.logprobs: dict[int, TokenLogprob] = {}  # of filled positions, for requests that want them
        known = token_ids[: shape.length]
        self.token_ids[: len(known)] = known
        self.is_masked[: len(known)] = False
        self.is_given[: shape.num_prompt] = True
        for position, token_id in pinned.items():
            self.token_ids[position] = token_id
            self.is_masked[position] = False
            self.is_given[position] = True

    def masked_in(self, block: CanvasBlock) -> Positions:
        return block.start + np.flatnonzero(self.is_masked[block.start : block.end])

    def written_in(self, block: CanvasBlock) -> Positions:
        """Positions of a block that hold a token the model has chosen."""
        part = slice(block.start, block.end)
        return block.start + np.flatnonzero(~self.is_masked[part] & ~self.is_given[part])

    def fill(self, positions: Positions, token_ids: Int32) -> None:
        self.token_ids[positions] = token_ids
        self.is_masked[positions] = False

    def without_given(self, start: int, end: int) -> Int32:
        """Tokens start .. end with what the caller gave masked: the unconditional input of guidance."""
        return np.where(self.is_given[start:end], np.int32(self.mask_id), self.token_ids[start:end])

    def answer(self, end: int) -> tuple[int | None, ...]:
        """The answer up to position end, None where it is masked."""
        part = slice(self.shape.num_prompt, end)
        pairs = zip(self.token_ids[part].tolist(), self.is_masked[part].tolist(), strict=True)
        return tuple(None if is_masked else token_id for token_id, is_masked in pairs)
