"""kvarn.quantize: read a model tensor by tensor and write it in other types, as one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.backends.native import _native
from kvarn.checks import check_parameter
from kvarn.config import MAX_THREADS, is_offline
from kvarn.errors import ConfigError
from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.writer import Streamed, write_gguf
from kvarn.formats.weights import WeightSource
from kvarn.hub import OnProgress, resolve
from kvarn.machine import choose_threads
from kvarn.quantization.allocation.allocate import SizeTarget
from kvarn.quantization.blocks import Bytes, Float32, requantized
from kvarn.quantization.disk import require_room, require_writable
from kvarn.quantization.imatrix import DIGESTS, ImportanceMatrix, read_imatrix, require_match
from kvarn.quantization.plan import QuantizationPlan, SizePlanner, plan_mix, refuse_requantizing
from kvarn.quantization.recipes import is_quantizable, mix_name
from kvarn.quantization.report import QuantizationReport, TensorChange
from kvarn.quantization.source import ModelSource, open_source

QUANTIZATION_VERSION = 2  # of the block layouts, as GGUF counts them


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """imatrix: a file of `kvarn imatrix`. pure: the one type for every matrix. requantize: also from quantised types.

    force: replace an output that exists.
    """

    imatrix: str | os.PathLike[str] | None = None
    pure: bool = False
    requantize: bool = False
    force: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        check_parameter.integer("threads", self.threads, 1, MAX_THREADS, optional=True)


def quantize(
    source: str | os.PathLike[str],
    type: str | SizeTarget,
    output: str | os.PathLike[str],
    *,
    options: QuantizeOptions | None = None,
    progress: OnProgress | None = None,
) -> QuantizationReport:
    """Write a model as GGUF in a type (Q8_0), a mix of llama.cpp (Q4_K_M) or types measured for a size (SizeTarget).

    The file appears when it is whole.
    """
    started = time.perf_counter()
    chosen, wanted = options or QuantizeOptions(), type if isinstance(type, SizeTarget) else mix_name(type)
    if chosen.pure and isinstance(wanted, SizeTarget):
        raise ConfigError("pure gives every matrix one type, a size many; give a type or no pure (--pure)")
    path = resolve(os.fspath(source), offline=is_offline(), on_progress=progress)
    target = Path(output)
    require_writable(target, path, force=chosen.force)
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


class _Job:
    """One source on its way to a file."""

    def __init__(self, path: Path, source: ModelSource, options: QuantizeOptions, progress: OnProgress | None) -> None:
        self._path, self._source, self._options, self._progress = path, source, options, progress
        self._threads = options.threads or choose_threads().count
        self._digests: tuple[str, ...] = ()
        self.matrix = None if options.imatrix is None else read_imatrix(options.imatrix)
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
        text = read_text(target.text)
        planner = SizePlanner(self._path, target, text, self._threads, self._progress)
        self._digests = text.digests
        planner.check(self._source, self._metadata(0))
        if self.matrix is None:
            self.matrix = planner.imatrix()
        return planner.plan(self._source, self._metadata(0), self.matrix)

    def write(self, target: Path, plan: QuantizationPlan) -> None:
        weights, team = self._source.weights, _native.ThreadTeam(self._threads)
        require_room(target, sum(change.num_bytes for change in plan.changes))
        tensors = {change.source.name: _streamed(weights, change, self.matrix, team) for change in plan.changes}
        progress = None if self._progress is None else _labelled(self._progress, target.name)
        write_gguf(target, self._metadata(plan.file_type), tensors, progress=progress)

    def _metadata(self, file_type: int) -> dict[str, Any]:
        """What the file will say: the source's metadata, how it was quantised, and by which texts."""
        changed: dict[str, Any] = {
            "general.quantization_version": QUANTIZATION_VERSION,
            "general.file_type": file_type,
        }
        matrix, digests = self.matrix, self._digests
        if matrix is not None:
            changed |= {
                "quantize.imatrix.file": os.path.basename(matrix.path),
                "quantize.imatrix.dataset": ", ".join(matrix.datasets),
                "quantize.imatrix.entries_count": len(matrix.entries),
                "quantize.imatrix.chunks_count": matrix.num_chunks,
            }
            digests = tuple(dict.fromkeys((*matrix.digests, *digests)))
        if digests:
            changed[DIGESTS] = list(digests)
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


def _labelled(progress: OnProgress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, label)
