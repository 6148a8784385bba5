"""A source with the scales of AWQ or SmoothQuant folded in: the same function, in weights that round better."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvarn.backends.native import _native
from kvarn.errors import ConfigError
from kvarn.evaluation.text import RunningText
from kvarn.formats.weights import TensorType
from kvarn.hub import OnProgress
from kvarn.quantization.folding.folds import Float32, Fold, FoldedWeights, folds
from kvarn.quantization.folding.scales import AwqSearch, InputFacts, smoothquant_scales
from kvarn.quantization.moments import MomentCollector
from kvarn.quantization.source import ModelSource


@dataclass(frozen=True, slots=True)
class FoldJob:
    """Which scales, for what types, measured on which text."""

    path: Path
    source: ModelSource
    text: RunningText
    threads: int
    progress: OnProgress | None
    has_imatrix: bool

    def run(self, method: str, types: Mapping[str, TensorType]) -> FoldedWeights:
        """Choose the scales of every fold and return the folded weights."""
        weights = self.source.weights
        search = AwqSearch(weights, types, _native.ThreadTeam(self.threads), has_imatrix=self.has_imatrix)
        wanted = {(fold.layer, fold.input): fold for fold in folds(self.source.spec, weights.tensors)}
        if not wanted:
            raise ConfigError(f"{weights.path} has no weights to fold scales of {method} into; use gptq or imatrix")
        scales: dict[Fold, Float32] = {}
        with closing(MomentCollector(self.path, self.text, self.threads)) as collector:
            for band in collector.bands():
                inputs = [one for one in band if (one.layer, one.name) in wanted]
                for one, moments in collector.collect(inputs, self.progress).items():
                    fold = wanted[one.layer, one.name]
                    facts = InputFacts(*collector.magnitudes(one), moments)
                    found = search.scales(fold, facts) if method == "awq" else smoothquant_scales(weights, fold, facts)
                    if found is not None:
                        scales[fold] = found
                    weights.release_pages(fold.readers)
        return FoldedWeights(weights, scales)
