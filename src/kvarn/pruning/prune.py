"""kvarn.prune: leave out layers, channels and heads of a model, measured on a text, and write what is left as GGUF."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from kvarn.checks import check_parameter
from kvarn.config import MODEL_NAMES, is_offline
from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import read_text, text_paths
from kvarn.hub import OnProgress, resolve
from kvarn.machine import choose_threads
from kvarn.models.describe import describe
from kvarn.pruning.cut import Cut, PrunedWeights, parameters, whole
from kvarn.pruning.families import prunable_parts, require_same_function
from kvarn.pruning.heal import CONTEXT, Healing, HealingReport, HealOptions, heal_chunks, require_torch
from kvarn.pruning.importance.activations import collect_activations
from kvarn.pruning.importance.criteria import DATA_FREE, Float32
from kvarn.pruning.importance.scores import PartScores
from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.output import PrunedFile
from kvarn.pruning.planner import CutPlanner
from kvarn.pruning.probe import CutProbe
from kvarn.pruning.report import CutOutcome, PruningReport
from kvarn.pruning.shapes import CutShape, hidden_step, shape_of
from kvarn.pruning.target_shape import ShapeTarget
from kvarn.quantization.disk import require_writable
from kvarn.quantization.source import ModelSource, open_source


def prune(
    source: str | os.PathLike[str],
    target: PruneTarget,
    output: str | os.PathLike[str],
    *,
    options: PruneOptions | None = None,
    progress: OnProgress | None = None,
) -> PruningReport:
    """Write a model without the parts that matter least on a text, as GGUF; the file appears when it is whole."""
    started = time.perf_counter()
    check_parameter.instance("target", target, PruneTarget, "a kvarn.PruneTarget, such as PruneTarget(keep=0.9)")
    check_parameter.instance("options", options, PruneOptions, "kvarn.PruneOptions, or None", optional=True)
    check_parameter.function("progress", progress)
    name, file = check_parameter.path("source", source, MODEL_NAMES), Path(check_parameter.path("output", output))
    chosen = options or PruneOptions()
    chosen.check_for(target)
    path = resolve(name, offline=is_offline(), on_progress=progress)
    require_writable(file, path, force=chosen.force, inputs=text_paths(chosen.text))
    with closing(open_source(path)) as opened:
        job = PruneJob(path, opened, target, chosen, progress)
        fits = _fits(path, target) and chosen.then is None and not chosen.heals
        report = job.copy(file) if target.removes_nothing or fits else job.run(file)
    return replace(report, seconds=time.perf_counter() - started)


def _fits(path: Path, target: PruneTarget) -> bool:
    """Whether a file is small enough as it is."""
    return target.num_bytes is not None and path.is_file() and path.stat().st_size <= target.num_bytes


class PruneJob:
    """One source on its way to a smaller model."""

    def __init__(
        self,
        path: Path,
        source: ModelSource,
        target: PruneTarget,
        options: PruneOptions,
        progress: OnProgress | None,
    ) -> None:
        self._path, self._source, self._options, self._progress = path, source, options, progress
        self._weights = source.weights
        self._spec = describe(source.weights).spec  # as GGUF has it, for folders as well
        self._threads = options.threads or choose_threads().count
        prunable_parts(self._weights, self._spec)
        self._text = read_text(options.text) if options.has_text else None
        digests = () if self._text is None else self._text.digests
        self._file = PrunedFile(path, source, options, self._threads, progress, digests)
        self.target = ShapeTarget(self._weights, self._spec, target, self._file.size)

    def copy(self, output: Path) -> PruningReport:
        """Nothing goes: the file itself."""
        self._file.copy(output)
        return self._report(output, whole(self._spec), None)

    def run(self, output: Path) -> PruningReport:
        """Measure, choose, heal where that was asked for, and write."""
        self.target.check()
        self._file.check()
        if self._options.heals:
            require_torch()
        with self.planner(output.parent) as planner:
            return self.write(planner, self.target.choose(planner), output)

    def write(self, planner: CutPlanner, shape: CutShape, output: Path) -> PruningReport:
        """The file of a shape, and what it is worth."""
        cut, weights = self.cut(planner, shape)
        weights, healing = self._healed(planner, cut, weights)
        self._file.write(output, weights)
        return replace(
            self._report(output, cut, planner),
            kl_unrounded=planner.measure(shape).kl,
            influence_kl=self._influence_kl(planner, shape),
            encoded_again=weights.encoded_again,
            healing=healing,
        )

    def cut(self, planner: CutPlanner, shape: CutShape) -> tuple[Cut, PrunedWeights]:
        """What stays for a shape, refitted, and its weights."""
        cut = planner.cut(shape)
        weights = self._pruned(planner, cut, planner.fitted(cut))
        require_same_function(weights, self._spec, cut)
        return cut, weights

    def _healed(
        self, planner: CutPlanner, cut: Cut, weights: PrunedWeights
    ) -> tuple[PrunedWeights, HealingReport | None]:
        if not self._options.heals:
            return weights, None
        assert self._text is not None
        chosen = HealOptions(self._options.heal_minutes, self._options.heal_steps, self._options.seed)
        ids = heal_chunks(self._text, planner.probe.tokenizer, fitting_context(self._path, CONTEXT))
        healing = Healing(self._weights, self._spec, ids, chosen)
        values, report = healing.run(weights, describe(weights).spec, self._progress)
        named = {weights.source_name(name): value for name, value in values.items()}
        return self._pruned(planner, cut, named), report

    @contextmanager
    def planner(self, folder: Path) -> Iterator[CutPlanner]:
        """The source, loaded, with its activations on the text; those lie in the folder, without a name."""
        text, norm = self._text, self._weights.array("output_norm.weight")
        assert text is not None
        with closing(CutProbe(self._path, text, self._threads, norm)) as probe:
            found = collect_activations(self._path, text, folder, self._threads, self._progress)
            with closing(found) as activations:
                scores = PartScores(
                    self._weights, self._spec, activations, probe.states, self._options.by, self._options.seed
                )
                yield CutPlanner(self._weights, self._spec, scores, probe, self._options.refit, self._progress)

    def _pruned(self, planner: CutPlanner, cut: Cut, values: dict[str, Float32]) -> PrunedWeights:
        return PrunedWeights(
            self._weights,
            self._spec,
            cut,
            refits=values,
            importance=planner.scores.activations.importance,
            moments=planner.scores.activations.of_matrix if self._options.refit else lambda _: None,
            threads=self._threads,
            keeps_floats=self._options.then is not None,
        )

    def _influence_kl(self, planner: CutPlanner, shape: CutShape) -> float | None:
        """What the same shape costs by influence, where the criterion looks at no activations."""
        if self._options.by not in DATA_FREE:
            return None
        scores = replace(planner.scores, by="influence", made={})
        other = replace(planner, scores=scores, trials=[])
        return other.measure(shape).kl

    def _report(self, output: Path, cut: Cut, planner: CutPlanner | None) -> PruningReport:
        kl, perplexity, before = None, None, None
        if planner is not None:
            kl, perplexity = planner.probe.of_file(output)
            before = planner.probe.perplexity()
        left = PrunedWeights(self._weights, self._spec, cut)
        first = cut.layers[0]
        shape = CutShape(len(cut.layers), len(first.channels), len(first.heads), len(first.kv_heads))
        source = CutOutcome(shape_of(self._spec), parameters(self._weights.tensors), self._source.num_bytes, before)
        return PruningReport(
            source=str(self._path),
            output=str(output),
            by=self._options.by,
            before=source,
            after=CutOutcome(shape, parameters(left.tensors), output.stat().st_size, perplexity),
            layers=tuple(one.layer for one in cut.layers),
            seconds=0.0,
            kl=kl,
            trials=() if planner is None else tuple(planner.trials),
            then=None if self._options.then is None else str(self._options.then),
            budget_bytes=self.target.target.num_bytes,
            channel_step=hidden_step(self._weights, self._spec),
        )
