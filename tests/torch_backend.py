"""The torch backend for tests: always on the CPU, whatever else the machine has."""

from __future__ import annotations

import pytest

from kvarn.backends.protocol import Backend


def torch_cpu(threads: int = 1) -> Backend:
    """A backend that computes in float32 on the CPU; skips the test where torch is not installed."""
    torch = pytest.importorskip("torch")
    from kvarn.backends.torch.backend import TorchBackend
    from kvarn.backends.torch.device import Device

    return TorchBackend(Device(torch.device("cpu"), torch.float32), threads)
