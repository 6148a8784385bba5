"""The interface between the engine and a backend: the engine owns ids, backends own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import LoraWeights
from kvarn.backends.batch import Batch, BlockCopy, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.resumable_forward import ResumableForward
from kvarn.errors import DeviceLost
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec, Pooling

Hidden = Any  # opaque, on the device: one state per output row of the batch, after the output norm


class Backend(Protocol):
    """An interpreter of ModelSpec."""

    name: str
    runs_ahead: bool  # it is a LaunchingBackend, and gains by it
    min_prompt_rows: int  # rows of a prompt that take about as long as one, where a step's cost is mostly fixed
    free_prompt_rows: int  # rows of a step that prompts may fill beside decodes while they take Pacer's FREE_S; or 0

    @property
    def progress(self) -> int:
        """A number that changes while a step computes, read by other threads; always 0 where a backend has none."""

    @property
    def lost(self) -> DeviceLost | None:
        """Why it will never compute again, read by other threads: a device or a process is gone; None: it can."""

    def unsupported(self, spec: ModelSpec) -> list[str]:
        """Name the fields of spec this backend cannot run; empty means it can."""

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights; progress(done_bytes, total_bytes). The source may be closed afterwards."""

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        """Reserve the paged cache (address space, not memory) and return its number of blocks.

        Window blocks and states are beside the budget, in the numbers that the layout gives.
        """

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        """Return the pages of free blocks of a group (see BlockCopy) to the system."""

    def return_states(self, slots: Iterable[int]) -> None:
        """The same for free slots of recurrent states."""

    def forward(self, batch: Batch) -> Hidden: ...

    def begin(self, batch: Batch) -> ResumableForward:
        """Start a forward pass that is computed in pieces; other batches may be computed between them."""

    def sample(self, hidden: Hidden, rows: SampleRows) -> Sampled: ...

    def score(self, hidden: Hidden, targets: npt.NDArray[np.int32], num_top: int) -> Scored: ...

    def pool(self, hidden: Hidden, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> npt.NDArray[np.float32]:
        """One vector per sequence; hidden holds every row of every sequence."""

    def logits(self, hidden: Hidden) -> npt.NDArray[np.float32]:
        """(output rows, vocabulary): for tests and Python samplers only."""

    def close(self) -> None: ...


class AdaptingBackend(Backend, Protocol):
    """Computes batches whose sequences have adapters."""

    def prepare_adapter(self, weights: LoraWeights) -> Any:
        """Pack an adapter of the loaded model: the handle of its AdapterUse. Any thread may call it at any time."""


class JoiningBackend(Backend, Protocol):
    """Computes layers that predict further tokens from states: see kvarn.models.architectures.draft_layer."""

    def embed_tokens(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Their rows of the embedding, scaled, (tokens, width): the first half of Batch.inputs."""


class LaunchingBackend(Backend, Protocol):
    """Computes while the host goes on: a batch may have tokens that the last one chose and nobody has read."""

    def sample_later(self, hidden: Hidden, rows: SampleRows) -> Callable[[], Sampled]:
        """Begin to sample; call the result for the tokens. The next batch knows them as chosen_token(row)."""


@runtime_checkable
class BlockBytesBackend(Protocol):
    """Gives and takes the bytes of blocks, so that they can be kept elsewhere and come back bit for bit."""

    def kernel_identity(self) -> str:
        """What computes, to the hash of its code: two with the same answer compute the same bits."""

    def num_block_bytes(self) -> int:
        """Of one block of the layers that keep all; reserve_kv comes before."""

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """A copy of a block's bytes."""

    def write_block(self, block_id: int, content: npt.NDArray[np.uint8]) -> None:
        """Put back what read_block gave, in any block; the content is copied."""

    def populate_blocks(self, count: int) -> None:
        """Have the system back the first blocks with memory before they are written. Any thread may call it."""
