"""Layer-wise prefill: one chunk of a long prompt goes through some layers per step, beside the other requests.

    step    |decodes|layers 0-2|   |decodes|layers 3-5|   ...   |decodes|layers 27-29|  -> the chunk is computed

A few rows per step through all layers would read all keys and values of the prompt again in every step, for two or
three rows. Layer-wise prefill reads them once for the whole chunk.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from kvarn.engine.scheduling.plan import BatchEntry
from kvarn.request import Request

FIRST_ROWS = 64  # of a chunk, as long as nothing is known about its cost
LEAST_ROWS = 16
ROW_STEP = 8  # rows that share the work of a kernel
PIECE_SHARE = 0.24  # of a step's time for prompts is what one piece should take: four fit, and a late one hurts little
MAX_CHANGE = 2.0  # of the chunk's size from one to the next
FEW_ROWS = 24  # a step that has room for fewer prompt rows than this uses layer-wise prefill ...
LONG_PROMPT = 512  # ... if the prompt is at least this long: many short ones go faster side by side than one by one


@dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk under way."""

    entry: BatchEntry

    @property
    def request(self) -> Request:
        return self.entry.span.request

    @property
    def num_rows(self) -> int:
        return len(self.entry.span.token_ids)


class LayerwisePrefill:
    """Holds the chunk under way, and learns how large the next one should be."""

    def __init__(self, max_rows: int) -> None:
        self.num_rows = min(FIRST_ROWS, max_rows)  # of the next chunk
        self.chunk: Chunk | None = None
        self._max_rows = max_rows
        self._has_begun = False
        self._went_last = False

    @property
    def gives_way(self) -> bool:
        """Whether other prompts come first in this step: they and the chunk alternate."""
        return self.chunk is None or self._went_last

    def wants(self, request: Request, num_rows: int) -> bool:
        """Whether a prompt that would get num_rows rows beside others should rather go through here."""
        num_missing = len(request.token_ids) - request.num_computed
        is_long = len(request.token_ids) >= LONG_PROMPT and num_missing >= max(2 * num_rows, LEAST_ROWS)
        return self.chunk is None and 0 < num_rows < FEW_ROWS and is_long

    def holds(self, request: Request) -> bool:
        return self.chunk is not None and self.chunk.request is request

    def is_open_to(self, prompts: Collection[Request]) -> bool:
        """Whether the chunk's request takes part in this step."""
        return self.chunk is not None and any(request is self.chunk.request for request in prompts)

    def enter(self, entry: BatchEntry) -> None:
        assert self.chunk is None
        self.chunk, self._has_begun = Chunk(entry), False

    def advance(self) -> tuple[Chunk, bool]:
        """The chunk advances in this step; and whether that is its first one."""
        assert self.chunk is not None
        is_first, self._has_begun, self._went_last = not self._has_begun, True, True
        return self.chunk, is_first

    def rest(self) -> None:
        """The chunk does not advance in this step."""
        self._went_last = False

    def learn(self, allowed_s: float, piece_s: float) -> None:
        """A chunk is done: size the next one so that a piece of it takes its share of a step."""
        if self.chunk is None or not math.isfinite(allowed_s):
            return
        change = min(MAX_CHANGE, max(1 / MAX_CHANGE, PIECE_SHARE * allowed_s / max(piece_s, 1e-9)))
        wanted = int(self.chunk.num_rows * change) // ROW_STEP * ROW_STEP
        self.num_rows = min(self._max_rows, max(LEAST_ROWS, wanted))

    def leave(self, request: Request) -> None:
        """The chunk is computed, or its request has lost its blocks."""
        if self.holds(request):
            self.chunk = None
