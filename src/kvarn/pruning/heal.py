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
from kvarn.pruning.cut import PrunedWeights
from kvarn.pruning.importance.criteria import Float32
from kvarn.pruning.options import PruneOptions
from kvarn.pruning.report import HealingReport

if TYPE_CHECKING:
    from kvarn.backends.torch.training.distill import DistilledModel
    from kvarn.tokenizer.tokenizer import Tokenizer

CONTEXT, MIN_CHUNKS = 256, 16


def require_torch() -> None:
    """Refuse healing where torch is missing, before anything is measured."""
    if find_spec("torch") is None:
        raise ConfigError("healing needs torch, which is not installed; install kvarn[torch], or leave --heal out")


@dataclass(frozen=True, slots=True)
class Healing:
    """One source and its text; options: for how long, and the seed."""

    source: WeightSource
    spec: ModelSpec
    text: RunningText
    tokenizer: Tokenizer
    options: PruneOptions

    def chunks(self) -> npt.NDArray[np.int32]:
        """The sequences to learn from."""
        found = cut_chunks(self.text, self.tokenizer, CONTEXT, None).ids
        if len(found) < MIN_CHUNKS:
            raise InvalidParameter(
                f"{', '.join(self.text.names)} gives {len(found)} chunks of {CONTEXT} tokens, healing needs "
                f"{MIN_CHUNKS}, better thousands; give a longer text",
                field="text",
            )
        return found

    def run(
        self, pruned: PrunedWeights, spec: ModelSpec, progress: OnProgress | None
    ) -> tuple[dict[str, Float32], HealingReport]:
        """New values by the pruned model's names, and what it took."""
        from kvarn.backends.torch.training.distill import DistillOptions, distill

        minutes, steps = self.options.heal_minutes, self.options.heal_steps
        seconds = None if minutes is None or steps else 60 * minutes
        options = DistillOptions(seconds=seconds, steps=steps, seed=self.options.seed)

        def show(done: int, total: int | None) -> None:
            if progress is not None:
                progress(done, total, "steps of healing")

        done = distill(_model(self.spec, self.source), _model(spec, pruned), self.chunks(), options, show)
        tenth = max(1, len(done.losses) // 10)
        ends = float(np.mean(done.losses[:tenth])), float(np.mean(done.losses[-tenth:]))
        return done.weights, HealingReport(done.device, len(done.losses), done.num_tokens, done.seconds, ends)


def _model(spec: ModelSpec, weights: WeightSource) -> DistilledModel:
    from kvarn.backends.torch.training.distill import DistilledModel

    return DistilledModel(spec, [name for name in weights.tensors if name not in FOLDED], weights.array)
