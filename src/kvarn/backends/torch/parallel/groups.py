"""How ranks exchange tensors: NCCL between GPUs, gloo over the loopback interface between processes on the CPU.

Sums are gathered and added in the order of ranks, on every rank: a library's all-reduce adds in an order that depends
on where a row lies in the batch, which would make its bits depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvarn.backends.torch.device import Device
from kvarn.backends.torch.parallel.shards import RankPlace

LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # whose types do not tell what it exports


class TensorGroup:
    """The ranks that share every layer of a stage."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self.size = size

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor of one shape, in the order of ranks."""
        if self.size == 1:
            return [x]
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([parts], [own]).wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in float32 and in their order; the same bits on every rank."""
        first, *others = self.gather(x)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor; x is overwritten on the others."""
        if self.size > 1:
            self._group.broadcast([x]).wait()
        return x

    def abort(self) -> None:
        """Give up what is under way."""
        if self._group is not None:
            self._group.abort()


class Ranks:
    """One rank's connections: to those that share its layers, and to the stages before and after it."""

    def __init__(self, place: RankPlace, device: Device, tensor: TensorGroup, stages: Any) -> None:
        self.place = place
        self.tensor = tensor
        self._device = device
        self._stages = stages

    def send(self, x: Tensor, rank: int) -> None:
        self._stages.send([x.contiguous()], rank, 0).wait()

    def receive(self, shape: Sequence[int], rank: int) -> Tensor:
        """A tensor of that shape in the device's type."""
        x = torch.empty(tuple(shape), dtype=self._device.dtype, device=self._device.torch_device)
        self._stages.recv([x], rank, 0).wait()
        return x

    def abort(self) -> None:
        """Release a computation that waits for a rank that is gone; gloo does that by itself."""
        if self._device.kind == "cuda":
            self.tensor.abort()
            if self._stages is not None:
                self._stages.abort()


def connect(place: RankPlace, device: Device, store: Path, timeout_s: float) -> Ranks:
    """Meet all other ranks; blocks until they are there."""
    shape = place.shape
    shared = dist.FileStore(str(store), shape.num_ranks)
    timeout = timedelta(seconds=timeout_s)
    tensor, stages = None, None
    if shape.tensor > 1:
        prefix = dist.PrefixStore(f"tensor {place.stage}", shared)
        tensor = _make_group(device, prefix, place.part, shape.tensor, timeout)
    if shape.pipeline > 1:
        stages = _make_group(device, dist.PrefixStore("stages", shared), place.rank, shape.num_ranks, timeout)
    return Ranks(place, device, TensorGroup(tensor, shape.tensor), stages)


def _make_group(device: Device, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of its own, so that one process can be in several; torch's default group is one per process."""
    if device.kind == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, rank, size, options)
