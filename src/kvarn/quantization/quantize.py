"""kvarn.quantize: read a model tensor by tensor and write it in other types, as one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvarn.backends.native import _native
from kvarn.checks import check_parameter
from kvarn.config import MAX_THREADS, MODEL_NAMES, is_offline
from kvarn.errors import ConfigError
from kvarn.evaluation.text import DIGESTS, TextFiles, calibration_digests, read_text, text_paths
from kvarn.formats.gguf.writer import Streamed, write_gguf
from kvarn.formats.weights import WeightSource
from kvarn.hub import OnProgress, resolve
from kvarn.machine import choose_threads
from kvarn.quantization.allocation.allocate import SizeTarget
from kvarn.quantization.blocks import Bytes, Float32, requantized
from kvarn.quantization.disk import require_new_folder, require_room, require_writable
from kvarn.quantization.feedback import FeedbackJob, Spool
from kvarn.quantization.folding.fold import FoldJob
from kvarn.quantization.folding.folds import folded_imatrix
from kvarn.quantization.fp8.folder import write_fp8_folder
from kvarn.quantization.fp8.scheme import FP8Scheme
from kvarn.quantization.imatrix import ImportanceMatrix, read_imatrix, require_match
from kvarn.quantization.plan import QuantizationPlan, SizePlanner, plan_mix, refuse_requantizing
from kvarn.quantization.recipes import is_quantizable, mix_name
from kvarn.quantization.report import QuantizationReport, TensorChange
from kvarn.quantization.source import ModelSource, open_source
from kvarn.quantization.storage_only.types import StorageOnlyType

METHODS = ("rtn", "imatrix", "awq", "gptq", "smoothquant")
FOLDING = ("awq", "smoothquant")
QUANTIZATION_VERSION = 2  # of the block layouts, as GGUF counts them


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """imatrix: a file of `kvarn imatrix`, or what collect_imatrix gave. pure: the one type for every matrix.

    requantize: also from quantised types.
    force: replace an output that exists. method: one of METHODS; None: imatrix where one is given, else rtn.
    text: files for a size and for gptq, which measure; never the ones to judge the result by.
    measured: of a size, keep what was measured in this file, and take from it what it has already.
    """

    imatrix: str | os.PathLike[str] | ImportanceMatrix | None = None
    pure: bool = False
    requantize: bool = False
    force: bool = False
    threads: int | None = None
    method: str | None = None
    text: TextFiles = ()
    measured: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_parameter.integer("threads", self.threads, 1, MAX_THREADS, optional=True)
        check_parameter.one_of("method", self.method, METHODS, optional=True)
        for name in ("imatrix", "measured"):
            if not isinstance(getattr(self, name), ImportanceMatrix | None):
                check_parameter.path(name, getattr(self, name))
        for name in ("pure", "requantize", "force"):
            check_parameter.flag(name, getattr(self, name))
        text_paths(self.text)
        if self.method == "rtn" and self.imatrix is not None:
            raise ConfigError("rtn rounds without an importance matrix; give no imatrix, or another method")

    @property
    def has_text(self) -> bool:
        return len(text_paths(self.text)) > 0

    def inputs(self) -> list[Path]:
        """The files that are read beside the source."""
        named = (self.imatrix, self.measured)
        return [*text_paths(self.text), *(Path(one) for one in named if not isinstance(one, ImportanceMatrix | None))]

    def check_for(self, type: str | SizeTarget) -> None:
        """Refuse what does not go together with a type or a size."""
        if self.pure and isinstance(type, SizeTarget):
            raise ConfigError("pure gives every matrix one type, a size many; give a type or no pure (--pure)")
        measures = isinstance(type, SizeTarget) or self.method in ("gptq", *FOLDING)
        if measures and not self.has_text:
            what = "a size" if isinstance(type, SizeTarget) else self.method
            raise ConfigError(f"{what} needs a text to measure on; give one (--text FILE)")
        if self.has_text and not measures:
            raise ConfigError(
                "a text is for a size (--bytes, --bpw) and for awq, gptq and smoothquant; weigh errors with an imatrix"
            )
        if self.measured is not None and not isinstance(type, SizeTarget):
            raise ConfigError("only a size measures tensors one by one; give --bytes or --bpw, or no measured file")
        if self.method == "imatrix" and self.imatrix is None and not isinstance(type, SizeTarget):
            raise ConfigError("the method imatrix needs an imatrix; give one (--imatrix FILE), or another method")
        if isinstance(type, SizeTarget) and self.method in ("rtn", *FOLDING):
            raise ConfigError(f"a size goes with the methods imatrix and gptq, not with {self.method}; give a type")

    def check_for_fp8(self) -> None:
        """Refuse what FP8 does not know: its codes are the nearest ones, under scales of the largest values."""
        given = {"imatrix": self.imatrix, "text": self.has_text, "pure": self.pure, "requantize": self.requantize}
        unknown = [name for name, value in given.items() if value]
        if self.method not in (None, "rtn"):
            unknown.append(f"method {self.method}")
        if unknown:
            raise ConfigError(f"FP8 takes no {', no '.join(unknown)}; leave it out, or choose a GGUF type")


def quantize(
    source: str | os.PathLike[str],
    type: str | SizeTarget,
    output: str | os.PathLike[str],
    *,
    options: QuantizeOptions | None = None,
    progress: OnProgress | None = None,
) -> QuantizationReport:
    """Write a model as GGUF in a type (Q8_0), a mix of llama.cpp (Q4_K_M) or types measured for a size (SizeTarget).

    FP8_TENSOR, FP8_ROW and FP8_BLOCK write a safetensors folder. What is written appears when it is whole.
    """
    started = time.perf_counter()
    check_parameter.instance("options", options, QuantizeOptions, "kvarn.QuantizeOptions, or None", optional=True)
    check_parameter.function("progress", progress)
    name, target = check_parameter.path("source", source, MODEL_NAMES), Path(check_parameter.path("output", output))
    chosen, wanted = options or QuantizeOptions(), type if isinstance(type, SizeTarget) else mix_name(type)
    chosen.check_for(wanted)
    path = resolve(name, offline=is_offline(), on_progress=progress)
    if isinstance(wanted, str) and wanted in FP8Scheme.__members__:
        return _quantize_fp8(path, FP8Scheme[wanted], target, chosen, progress)
    require_writable(target, path, force=chosen.force, inputs=chosen.inputs())
    opened = open_source(path)
    try:
        job = _Job(path, opened, chosen, progress)
        plan = job.plan_mix(wanted) if isinstance(wanted, str) else job.plan_size(wanted)
        job.write(target, plan)
    finally:
        opened.close()
    return QuantizationReport(
        source=str(path),
        output=str(target),
        mix=plan.mix,
        num_bytes=target.stat().st_size,
        source_bytes=opened.num_bytes,
        seconds=time.perf_counter() - started,
        changes=plan.changes,
        imatrix=None if job.matrix is None else job.matrix.path,
        kl=plan.kl,
    )


def _quantize_fp8(
    path: Path, scheme: FP8Scheme, target: Path, options: QuantizeOptions, progress: OnProgress | None
) -> QuantizationReport:
    started = time.perf_counter()
    options.check_for_fp8()
    require_new_folder(target)
    changes = write_fp8_folder(path, target, scheme, None if progress is None else _labelled(progress, target.name))
    return QuantizationReport(
        source=str(path),
        output=str(target),
        mix=scheme.name,
        num_bytes=(target / "model.safetensors").stat().st_size,
        source_bytes=sum(change.source.num_bytes for change in changes),
        seconds=time.perf_counter() - started,
        changes=changes,
    )


class _Job:
    """One source on its way to a file."""

    def __init__(self, path: Path, source: ModelSource, options: QuantizeOptions, progress: OnProgress | None) -> None:
        self._path, self._source, self._options, self._progress = path, source, options, progress
        self._threads = options.threads or choose_threads().count
        self._text = read_text(options.text) if options.has_text else None
        given = options.imatrix
        self.matrix = given if isinstance(given, ImportanceMatrix | None) else read_imatrix(given)
        if self.matrix is not None:
            require_match(self.matrix, source.weights.tensors)

    def plan_mix(self, mix: str) -> QuantizationPlan:
        plan = plan_mix(self._source, mix, self.matrix, pure=self._options.pure)
        changed = [change.source for change in plan.changes if not change.is_copy]
        refuse_requantizing(self._source, changed, confirmed=self._options.requantize)
        return plan

    def plan_size(self, target: SizeTarget) -> QuantizationPlan:
        matrices = [info for info in self._source.weights.tensors.values() if is_quantizable(info)]
        refuse_requantizing(self._source, matrices, confirmed=self._options.requantize)
        assert self._text is not None
        planner = SizePlanner(
            self._path,
            target,
            self._text,
            self._threads,
            self._progress,
            measures_result=self._options.method != "gptq",
            measured=None if self._options.measured is None else Path(self._options.measured),
        )
        planner.check(self._source, self._metadata(0, planner.imatrix_facts()))
        if self.matrix is None:
            self.matrix = planner.imatrix()
        return planner.plan(self._source, self._metadata(0), self.matrix)

    def write(self, target: Path, plan: QuantizationPlan) -> None:
        plan, weights, matrix = self._folded(plan)
        team = _native.ThreadTeam(self._threads)
        num_bytes = sum(change.num_bytes for change in plan.changes)
        require_room(target, num_bytes if self._options.method != "gptq" else 2 * num_bytes)
        tensors = {change.source.name: _streamed(weights, change, matrix, team) for change in plan.changes}
        if self._options.method == "gptq" and self._text is not None:
            job = FeedbackJob(self._path, weights, self._text, self.matrix, self._threads, self._progress)
            spool = job.run(plan.changes, target.parent)
            tensors |= {name: _spooled(tensors[name], spool, name) for name in spool.names}
        progress = None if self._progress is None else _labelled(self._progress, target.name)
        write_gguf(target, self._metadata(plan.file_type), tensors, progress=progress)

    def _folded(self, plan: QuantizationPlan) -> tuple[QuantizationPlan, WeightSource, ImportanceMatrix | None]:
        """What is rounded: the source, or the source with the scales of a method folded in."""
        method = self._options.method
        if method not in FOLDING or self._text is None:
            return plan, self._source.weights, self.matrix
        has_imatrix = self.matrix is not None
        job = FoldJob(self._path, self._source, self._text, self._threads, self._progress, has_imatrix)
        types = [(change.source.name, change.type) for change in plan.changes]
        weights = job.run(method, {name: t.nearest if isinstance(t, StorageOnlyType) else t for name, t in types})
        changes = tuple(replace(change, source=weights.tensors[change.source.name]) for change in plan.changes)
        matrix = None if self.matrix is None else folded_imatrix(self.matrix, weights)
        return replace(plan, changes=changes), weights, matrix

    def _metadata(self, file_type: int, to_come: ImportanceMatrix | None = None) -> dict[str, Any]:
        """What the file will say: the source's metadata, how it was quantised, and by which texts.

        to_come: what will be said of a matrix that is not collected yet.
        """
        changed: dict[str, Any] = {
            "general.quantization_version": QUANTIZATION_VERSION,
            "general.file_type": file_type,
        }
        matrix, digests = self.matrix or to_come, () if self._text is None else self._text.digests
        if matrix is not None:
            changed |= {
                "quantize.imatrix.file": os.path.basename(matrix.path),
                "quantize.imatrix.dataset": ", ".join(matrix.datasets),
                "quantize.imatrix.entries_count": len(matrix.entries),
                "quantize.imatrix.chunks_count": matrix.num_chunks,
            }
            digests = (*matrix.digests, *digests)
        digests = (*calibration_digests(self._source.weights.metadata), *digests)
        if digests:
            changed[DIGESTS] = list(dict.fromkeys(digests))
        return {**self._source.metadata(), **changed}


def _streamed(
    weights: WeightSource, change: TensorChange, matrix: ImportanceMatrix | None, team: _native.ThreadTeam
) -> Streamed:
    info = change.source

    def make() -> Iterator[Bytes]:
        if change.is_copy:
            yield weights.raw(info.name)
        else:
            importance: Float32 | None = None
            if change.is_weighted and matrix is not None:
                importance = matrix.entries[info.name].importance
            yield from requantized(weights.raw(info.name), info, change.type, importance, team)
        weights.release_pages((info.name,))
        weights.verify_unchanged()

    return Streamed(change.type, info.shape, make)


def _spooled(tensor: Streamed, spool: Spool, name: str) -> Streamed:
    return Streamed(tensor.type, tensor.shape, lambda: iter([spool.read(name)]))


def _labelled(progress: OnProgress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, label)
