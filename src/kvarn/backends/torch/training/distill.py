"""Distil one model into a smaller one of the same vocabulary: the teacher's next-token distributions on a text.

Only norms and matrices of the layers learn; embedding and head stay the teacher's. Same seed, same number of steps and
same threads on a CPU: same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.torch.training.dense import DenseDecoder, ReadArray, unsupported
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.models.spec import ModelSpec

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

WARM_UP, WARM_UP_SHARE = 8, 0.05  # steps at least, of the whole otherwise
GPU_BATCH, GPU_RATE = 32, 5e-4  # sequences of a step, and how far a step goes
CPU_BATCH, CPU_RATE = 1, 5e-5  # few tokens: their gradient is mostly noise
FINAL_SHARE = 0.1  # of the rate, at the end
MAX_NORM = 1.0
GPU_LOGIT_ROWS, CPU_LOGIT_ROWS = 4096, 256  # at one time: rows x vocabulary


@dataclass(frozen=True, slots=True)
class DistilledModel:
    """A spec with its weights: their names and a reader."""

    spec: ModelSpec
    names: list[str]
    read: ReadArray


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """How long: seconds, or exactly so many steps. batch: sequences of a step; None: as the device is used to."""

    seconds: float | None = None
    steps: int | None = None
    batch: int | None = None
    rate: float | None = None
    seed: int = 0
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Distilled:
    """weights: those that learned. losses: of every step."""

    weights: dict[str, Float32]
    losses: tuple[float, ...]
    num_tokens: int
    seconds: float
    device: str


class Distillation:
    """A student on sequences of tokens, (sequences, length), as it is now. losses: of every step so far."""

    def __init__(
        self,
        teacher: DistilledModel,
        student: DistilledModel,
        ids: Int32,
        options: DistillOptions,
    ) -> None:
        for model in (teacher, student):
            _require_supported(model.spec)
        self._device, self._options = _device(options.device), options
        torch.manual_seed(options.seed)
        on_gpu = self._device.type == "cuda"
        batch, rate = (GPU_BATCH, GPU_RATE) if on_gpu else (CPU_BATCH, CPU_RATE)
        self._rate, self._logit_rows = options.rate or rate, GPU_LOGIT_ROWS if on_gpu else CPU_LOGIT_ROWS
        self.teacher = DenseDecoder(teacher.spec, teacher.names, teacher.read, self._device)
        self.student = DenseDecoder(student.spec, student.names, student.read, self._device)
        learning = [name for name in student.names if name.startswith(("blk.", "output_norm"))]
        self._learning = {name: self.student.weights[name].requires_grad_() for name in learning}
        self._optimizer = torch.optim.AdamW(self._learning.values(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._batches = _batches(ids, options.batch or batch, options.seed)
        self.losses: list[float] = []

    def run(self, progress: Callable[[int, int | None], None] | None = None) -> Distilled:
        """Train for the time or the steps there are."""
        started, num_tokens = time.perf_counter(), 0
        while (done := self._done(len(self.losses), time.perf_counter() - started)) < 1:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * rate_share(len(self.losses), done)
            ids = torch.from_numpy(next(self._batches)).long().to(self._device)
            self.losses.append(self._step(ids))
            if not math.isfinite(self.losses[-1]):
                raise ConfigError(
                    f"healing diverged after {len(self.losses)} steps: its loss is no number; prune without it"
                )
            num_tokens += ids.numel()
            if progress is not None:
                progress(len(self.losses), self._options.steps)
        weights = {name: value.detach().cpu().numpy() for name, value in self._learning.items()}
        return Distilled(weights, tuple(self.losses), num_tokens, time.perf_counter() - started, _title(self._device))

    def _done(self, steps: int, seconds: float) -> float:
        """The share of the work that is done: of the steps, where they are given, else of the time."""
        if self._options.steps is not None:
            return steps / self._options.steps
        assert self._options.seconds is not None
        return seconds / self._options.seconds

    def _step(self, ids: Tensor) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            with torch.no_grad():
                wanted = self.teacher.hidden(ids).flatten(0, 1)
            found = self.student.hidden(ids).flatten(0, 1)
            loss = self._loss_and_gradient(wanted, found)
        torch.nn.utils.clip_grad_norm_(self._learning.values(), MAX_NORM)
        self._optimizer.step()
        return loss

    def _loss_and_gradient(self, wanted: Tensor, found: Tensor) -> float:
        """Mean KL; its gradient by states is summed up some rows at a time, so that rows x vocabulary never exists."""
        leaf, rows = found.detach().requires_grad_(), self._logit_rows
        loss = torch.zeros((), device=leaf.device)
        for at in range(0, len(leaf), rows):
            with torch.no_grad():
                p = torch.log_softmax(self.teacher.logits(wanted[at : at + rows]), dim=-1)
            q = torch.log_softmax(self.student.logits(leaf[at : at + rows]), dim=-1)
            part = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True) / len(leaf)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        assert leaf.grad is not None
        found.backward(leaf.grad)  # type: ignore[no-untyped-call]
        return float(loss)


def rate_share(step: int, done: float) -> float:
    """Linear warm-up over the first part of the work, times half a cosine down to FINAL_SHARE over the whole."""
    fallen = FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    return min(1.0, (step + 1) / WARM_UP, max(1 / WARM_UP, done / WARM_UP_SHARE)) * fallen


def _batches(ids: Int32, size: int, seed: int) -> Iterator[Int32]:
    """The sequences in ever new orders."""
    rng = np.random.default_rng(seed)
    size = min(size, len(ids))
    while True:
        order = rng.permutation(len(ids))
        for at in range(0, len(ids) - size + 1, size):
            yield ids[order[at : at + size]]


def _require_supported(spec: ModelSpec) -> None:
    if wrong := unsupported(spec):
        raise UnsupportedModel(f"healing does not compute {', '.join(wrong)}; prune without it", fields=tuple(wrong))


def _device(name: str | None) -> torch.device:
    if name is not None:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
