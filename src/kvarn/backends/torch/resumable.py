"""A forward pass that goes on layer by layer, in the time that it is given. Knows no backend."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.device import computing
from kvarn.backends.torch.layers import Model
from kvarn.backends.torch.step import Step


class TorchResumableForward:
    """A forward pass, one layer after the other."""

    def __init__(
        self,
        model: Model,
        step: Step,
        cache: DeviceCache,
        *,
        on_layer: Callable[[], None],
        synchronise: Callable[[], None],
    ) -> None:
        self._model, self._step, self._cache = model, step, cache
        self._on_layer, self._synchronise = on_layer, synchronise
        self._x: Tensor | None = None
        self._layer = 0
        self.piece_s = 0.0

    @computing
    def advance(self, seconds: float) -> Tensor | None:
        """Run layers for about that long, at least one."""
        started = time.perf_counter()
        while True:
            begun = time.perf_counter()
            hidden = self.run_next()
            self._synchronise()
            now = time.perf_counter()
            self.piece_s = max(self.piece_s, now - begun)
            if hidden is not None or now - started >= seconds:
                return hidden

    def run_next(self) -> Tensor | None:
        """One more layer; the hidden states after the last."""
        model, step = self._model, self._step
        x = model.enter(step) if self._x is None else self._x
        if self._layer < len(model.weights.blocks):
            x = model.run_block(x, self._layer, step, self._cache)
            self._layer += 1
            self._on_layer()
        self._x = x
        return model.finish(x, step) if self._layer == len(model.weights.blocks) else None
