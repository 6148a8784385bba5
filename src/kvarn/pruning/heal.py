"""Healing: the weights of a cut, trained for a while to predict as the source does. The training is torch's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvarn.errors import ConfigError, InvalidParameter
from kvarn.evaluation.text import RunningText, cut_chunks
from kvarn.formats.weights import WeightSource
from kvarn.hub import OnProgress
from kvarn.models.spec import ModelSpec
from kvarn.models.tensors.shapes import FOLDED
from kvarn.pruning.importance.criteria import Float32

if TYPE_CHECKING:
    from kvarn.backends.torch.training.distill import Distillation, DistilledModel
    from kvarn.tokenizer.tokenizer import Tokenizer

CONTEXT, MIN_CHUNKS = 512, 16


@dataclass(frozen=True, slots=True)
class HealOptions:
    """For how long: minutes, or exactly so many steps, which the same seed repeats. rate: None: as the device needs."""

    minutes: float | None
    steps: int | None
    seed: int
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class HealingReport:
    """A distillation from the source. losses: mean KL of the first and the last tenth of the steps."""

    device: str
    steps: int
    num_tokens: int
    seconds: float
    losses: tuple[float, float]


def require_torch() -> None:
    """Refuse healing where torch is missing, before anything is measured."""
    if find_spec("torch") is None:
        raise ConfigError("healing needs torch, which is not installed; install kvarn[torch], or leave --heal out")


@dataclass(frozen=True, slots=True)
class Healing:
    """One source and the sequences of tokens to learn from. Needs torch, and no native core."""

    source: WeightSource
    spec: ModelSpec
    ids: npt.NDArray[np.int32]
    options: HealOptions

    def run(
        self, pruned: WeightSource, spec: ModelSpec, progress: OnProgress | None
    ) -> tuple[dict[str, Float32], HealingReport]:
        """New values by the pruned model's names, and what it took."""

        def show(done: int, total: int | None) -> None:
            if progress is not None:
                progress(done, total, "steps of healing")

        done = self.distillation(pruned, spec).run(show)
        tenth = max(1, len(done.losses) // 10)
        ends = float(np.mean(done.losses[:tenth])), float(np.mean(done.losses[-tenth:]))
        return done.weights, HealingReport(done.device, len(done.losses), done.num_tokens, done.seconds, ends)

    def distillation(self, pruned: WeightSource, spec: ModelSpec) -> Distillation:
        """Both models on their device, ready to begin."""
        from kvarn.backends.torch.training.distill import Distillation, DistillOptions

        minutes, steps = self.options.minutes, self.options.steps
        seconds = None if minutes is None or steps else 60 * minutes
        options = DistillOptions(seconds=seconds, steps=steps, seed=self.options.seed, rate=self.options.rate)
        return Distillation(_model(self.spec, self.source), _model(spec, pruned), self.ids, options)


def heal_chunks(text: RunningText, tokenizer: Tokenizer, context: int = CONTEXT) -> npt.NDArray[np.int32]:
    """The sequences of a text to learn from."""
    found = cut_chunks(text, tokenizer, context, None).ids
    if len(found) < MIN_CHUNKS:
        raise InvalidParameter(
            f"{', '.join(text.names)} gives {len(found)} chunks of {context} tokens, healing needs "
            f"{MIN_CHUNKS}, better thousands; give a longer text",
            field="text",
        )
    return found


def _model(spec: ModelSpec, weights: WeightSource) -> DistilledModel:
    from kvarn.backends.torch.training.distill import DistilledModel

    return DistilledModel(spec, [name for name in weights.tensors if name not in FOLDED], weights.array)
