"""From a mapped file to a GPU: pieces go through two pinned buffers, one filled by several threads while the other is
on its way. Knows bytes, not tensors' types."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
PART_BYTES = 8 << 20  # of a piece, that one thread copies
NUM_THREADS = 8  # one alone reads a mapped file at 3 to 4 GB/s, a third of what the bus takes
LEAST_BYTES = 1 << 20  # fewer are copied at once


class Staging:
    """Copies arrays to one GPU, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvarn-staging")
        self._turn = 0

    def copy(self, values: npt.NDArray[np.uint8]) -> Tensor:
        """The same bytes on the device; what was read may be released, what was written may still be on its way."""
        if values.nbytes < LEAST_BYTES:
            return torch.from_numpy(np.array(values)).to(self._device)
        flat = values.reshape(-1)
        found = torch.empty(flat.shape, dtype=torch.uint8, device=self._device)
        for first in range(0, len(flat), PIECE_BYTES):
            self._copy_piece(flat[first : first + PIECE_BYTES], found[first : first + PIECE_BYTES])
        return found.view(values.shape)

    def _copy_piece(self, values: npt.NDArray[np.uint8], found: Tensor) -> None:
        buffer, copied = self._buffers[self._turn], self._copied[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        copied.synchronize()
        staged = buffer.numpy()
        parts = [slice(first, min(first + PART_BYTES, len(values))) for first in range(0, len(values), PART_BYTES)]
        list(self._threads.map(lambda part: np.copyto(staged[part], values[part]), parts))
        found.copy_(buffer[: len(values)], non_blocking=True)
        copied.record()

    def close(self) -> None:
        """End the threads; the buffers go with the last copy."""
        self._threads.shutdown()
        torch.cuda.synchronize(self._device)
