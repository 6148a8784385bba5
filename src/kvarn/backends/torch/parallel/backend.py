"""The torch backend on several ranks behind the protocol: rank 0 computes here, and every call is told to the workers.

The engine, the sampler and the server know nothing of it. Ranks are in step by construction: each sees the same calls
in the same order, with the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import Batch, BlockCopy, Float32, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.resumable_forward import ResumableForward, SingleShotForward
from kvarn.backends.torch.device import Device
from kvarn.backends.torch.parallel.rank import RankBackend
from kvarn.backends.torch.parallel.shards import ParallelShape, check_divides
from kvarn.backends.torch.parallel.workers import World
from kvarn.backends.torch.resumable import TorchResumableForward
from kvarn.errors import ConfigError, DeviceLost, ModelError
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import Attention, Block, ModelSpec, Pooling


class ParallelBackend:
    """One model on several devices. A rank that is lost is the end of all."""

    name = "torch"
    runs_ahead = False  # a chosen token is known to the other ranks once the host has read it

    def __init__(self, world: World) -> None:
        self._world = world
        self._workers = world.workers
        self._own = RankBackend(world.device, world.threads, world.ranks, self._with_stage)
        self.min_prompt_rows, self.free_prompt_rows = self._own.min_prompt_rows, self._own.free_prompt_rows

    @property
    def progress(self) -> int:
        return self._own.progress

    @property
    def lost(self) -> DeviceLost | None:
        return self._workers.failure

    def unsupported(self, spec: ModelSpec) -> list[str]:
        """Layers that read what another one cached, or the tokens themselves, cannot be divided."""
        shared = (f"blocks[{i}].attention.kv_source" for i, block in enumerate(spec.blocks) if _shares_keys(block))
        others = ["embedding.per_layer"] if spec.embedding.per_layer is not None else []
        others += ["altup"] if spec.altup is not None else []
        others += [f"blocks[{i}].beside" for i, block in enumerate(spec.blocks) if block.beside is not None]
        return [*self._own.unsupported(spec), *others, *shared]

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        """Load every rank's share at the same time, each from the file."""
        check_divides(spec, self._world.shape)
        with self._together():
            self._workers.tell("load", spec, weights.path)
            self._own.load(spec, weights, progress)
            self._workers.await_done()
        weights.verify_unchanged()

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        """The layout is the model's, or that of one rank's share: what counts is the number of blocks."""
        num_blocks = budget_bytes // layout.block_bytes
        if num_blocks < 1:
            raise ConfigError(f"kv_bytes is {budget_bytes:,}, one KV block needs {layout.block_bytes:,}")
        with self._together():
            self._workers.tell("reserve_blocks", layout, num_blocks)
            self._own.reserve_blocks(layout, num_blocks)
            self._workers.await_done()
        return num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        with self._together():
            self._workers.tell("copy_blocks", copies)
            self._own.copy_blocks(copies)

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        """Do nothing, as on one device."""

    def return_states(self, slots: Iterable[int]) -> None:
        """There are none."""

    def forward(self, batch: Batch) -> Tensor:
        self._own.check(batch)
        with self._together():
            self._workers.tell("forward", batch)
            return self._own.forward(batch)

    def begin(self, batch: Batch) -> ResumableForward:
        """Layer by layer where every rank has all layers; stages cannot be interrupted."""
        if self._world.shape.pipeline > 1:
            return SingleShotForward(self, batch)
        self._own.check(batch)
        with self._together():
            self._workers.tell("begin", batch)
            return ParallelForward(self, self._own.begin(batch))

    def sample(self, hidden: Tensor, rows: SampleRows) -> Sampled:
        return self._own.sample(hidden, rows)

    def score(self, hidden: Tensor, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        return self._own.score(hidden, targets, num_top)

    def pool(self, hidden: Tensor, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> Float32:
        return self._own.pool(hidden, row_starts, pooling)

    def logits(self, hidden: Tensor) -> Float32:
        return self._own.logits(hidden)

    def close(self) -> None:
        """Free everything and end the workers."""
        self._own.close()
        self._world.close()

    @torch.inference_mode()
    def run_next(self, passage: TorchResumableForward) -> Tensor | None:
        """One more layer on every rank."""
        with self._together():
            self._workers.tell("run_next")
            hidden = passage.run_next()
            self._own.synchronise()
            return hidden

    @contextmanager
    def _with_stage(self, num_rows: int) -> Iterator[None]:
        with self._together():
            self._workers.tell("join_logits", num_rows, num_ranks=self._world.shape.tensor)
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Compute with all ranks; whatever fails in the middle leaves them out of step, and is the end of them."""
        if self._workers.failure is not None:
            raise self._workers.error()
        try:
            yield
        except (ConfigError, ModelError) as error:
            self._workers.fail(str(error))
            raise
        except BaseException as error:
            raise self._workers.fail_after(error) from error


def start(shape: ParallelShape, devices: Sequence[Device], threads: int, timeout_s: float) -> ParallelBackend:
    """Start the processes of all other ranks; a backend that is closed ends them."""
    return ParallelBackend(World(shape, devices, threads, timeout_s))


class ParallelForward:
    """A forward pass, one layer after the other on all ranks."""

    def __init__(self, backend: ParallelBackend, passage: TorchResumableForward) -> None:
        self._backend = backend
        self._passage = passage
        self.piece_s = 0.0

    def advance(self, seconds: float) -> Tensor | None:
        """Run layers for about that long, at least one."""
        started = time.perf_counter()
        while True:
            begun = time.perf_counter()
            hidden = self._backend.run_next(self._passage)
            now = time.perf_counter()
            self.piece_s = max(self.piece_s, now - begun)
            if hidden is not None or now - started >= seconds:
                return hidden


def _shares_keys(block: Block) -> bool:
    return isinstance(block.mixer, Attention) and block.mixer.kv_source is not None
