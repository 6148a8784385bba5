"""The torch backend for tests: always on the CPU, whatever else the machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvarn.backends.protocol import Backend

if TYPE_CHECKING:
    from kvarn.backends.torch.parallel.workers import World


def torch_cpu(threads: int = 1) -> Backend:
    """A backend that computes in float32 on the CPU; skips the test where torch is not installed."""
    torch = pytest.importorskip("torch")
    from kvarn.backends.torch.backend import TorchBackend
    from kvarn.backends.torch.device import Device

    return TorchBackend(Device(torch.device("cpu"), torch.float32), threads)


def torch_world(tensor: int, pipeline: int = 1, timeout_s: float = 60.0) -> World:
    """Ranks on the CPU, one process each but the first; for many backends, one after the other."""
    torch = pytest.importorskip("torch")
    from kvarn.backends.torch.device import Device
    from kvarn.backends.torch.parallel.shards import ParallelShape
    from kvarn.backends.torch.parallel.workers import World

    shape = ParallelShape(tensor, pipeline)
    return World(shape, [Device(torch.device("cpu"), torch.float32)] * shape.num_ranks, 1, timeout_s)


def on_ranks(world: World) -> Backend:
    """A backend over the ranks of a world; the last one made is the one that may be used."""
    from kvarn.backends.torch.parallel.backend import ParallelBackend

    return ParallelBackend(world)
