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
from kvarn.quantization.folding.scales import AwqSearch, smoothquant_scales
from kvarn.quantization.moments import MomentCollector
from kvarn.quantization.source import ModelSource

Wanted = Mapping[tuple[int, str], Fold]  # by layer and input
Chosen = dict[Fold, Float32 | None]  # None: no scale helps


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
            raise ConfigError(
                f"{weights.path} has no weights to fold scales of {method} into; use another method, such as rtn"
            )
        with closing(MomentCollector(self.path, self.text, self.threads)) as collector:
            if method == "awq":
                found = self._by_awq(search, collector, wanted)
            else:
                found = self._by_smoothquant(collector, wanted)
        return FoldedWeights(weights, {fold: scales for fold, scales in found.items() if scales is not None})

    def _by_awq(self, search: AwqSearch, collector: MomentCollector, wanted: Wanted) -> Chosen:
        found: Chosen = {}
        for band in collector.bands():
            inputs = [one for one in band if (one.layer, one.name) in wanted]
            for one, moments in collector.collect(inputs, self.progress).items():
                fold = wanted[one.layer, one.name]
                found[fold] = search.scales(fold, collector.magnitudes(one)[0], moments)
                self.source.weights.release_pages(fold.readers)
        return found

    def _by_smoothquant(self, collector: MomentCollector, wanted: Wanted) -> Chosen:
        collector.observe(self.progress)
        found: Chosen = {}
        for one in (one for band in collector.bands() for one in band if (one.layer, one.name) in wanted):
            fold = wanted[one.layer, one.name]
            found[fold] = smoothquant_scales(self.source.weights, fold, collector.magnitudes(one)[1])
            self.source.weights.release_pages(fold.readers)
        return found
