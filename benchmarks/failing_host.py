"""The process of an engine whose GPU fails after a SIGUSR1: benchmarks.gpu_serving starts it as the server's engine."""

from __future__ import annotations

import signal
from typing import Any

from kvarn.engine.process import host


def fail_on_signal() -> None:
    """Make the next step after a SIGUSR1 fail as a broken device does."""
    from kvarn.backends.torch.backend import TorchBackend
    from kvarn.backends.torch.device import computing

    forward, is_asked = TorchBackend.forward, []
    signal.signal(signal.SIGUSR1, lambda *_: is_asked.append(True))

    @computing
    def failing(self: TorchBackend, batch: Any) -> Any:
        if is_asked:
            _break_device()
        return forward(self, batch)

    TorchBackend.forward = failing  # type: ignore[method-assign, assignment]


def _break_device() -> None:
    """An index out of bounds in a kernel; the CPU, which survives that, says what CUDA would."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("CUDA error: device-side assert triggered")
    torch.zeros(1, device="cuda")[torch.tensor([1 << 30], device="cuda")].cpu()


if __name__ == "__main__":
    fail_on_signal()
    host.main()
