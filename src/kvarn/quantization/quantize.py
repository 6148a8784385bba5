"""kvarn.quantize: read a model tensor by tensor and write it in other types, as one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.backends.native import _native
from kvarn.checks import check_parameter
from kvarn.config import MAX_THREADS, is_offline
from kvarn.errors import ConfigError
from kvarn.formats.gguf.writer import Streamed, write_gguf
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.hub import OnProgress, resolve
from kvarn.machine import choose_threads
from kvarn.models.spec import MixtureOfExperts, ModelSpec
from kvarn.quantization.blocks import FLOATS, Bytes, Float32, requantized
from kvarn.quantization.disk import require_room, require_writable
from kvarn.quantization.imatrix import DIGESTS, ImportanceMatrix, read_imatrix, require_match
from kvarn.quantization.recipes import (
    FILE_TYPES,
    MIXES,
    RecipeModel,
    fitting_type,
    is_quantizable,
    mix_name,
    wanted_type,
)
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
    type: str,
    output: str | os.PathLike[str],
    *,
    options: QuantizeOptions | None = None,
    progress: OnProgress | None = None,
) -> QuantizationReport:
    """Write a model as GGUF in a type (Q8_0) or a mix of llama.cpp (Q4_K_M); the file appears when it is whole."""
    started = time.perf_counter()
    chosen, mix = options or QuantizeOptions(), mix_name(type)
    path = resolve(os.fspath(source), offline=is_offline(), on_progress=progress)
    target = Path(output)
    require_writable(target, path, force=chosen.force)
    matrix = None if chosen.imatrix is None else read_imatrix(chosen.imatrix)
    opened = open_source(path)
    try:
        changes = plan_changes(opened, mix, chosen, matrix)
        _refuse_requantizing(opened.weights, changes, chosen)
        require_room(target, sum(change.num_bytes for change in changes))
        team = _native.ThreadTeam(chosen.threads or choose_threads().count)
        tensors = {change.source.name: _streamed(opened.weights, change, matrix, team) for change in changes}
        metadata = _metadata(opened.metadata(), mix, matrix)
        on_write = None if progress is None else _labelled(progress, target.name)
        write_gguf(target, metadata, tensors, progress=on_write)
    finally:
        opened.close()
    return QuantizationReport(
        source=str(path),
        output=str(target),
        mix=mix,
        num_bytes=target.stat().st_size,
        source_bytes=opened.num_bytes,
        seconds=time.perf_counter() - started,
        changes=tuple(changes),
        imatrix=None if matrix is None else matrix.path,
    )


def plan_changes(
    source: ModelSource, mix: str, options: QuantizeOptions, matrix: ImportanceMatrix | None
) -> list[TensorChange]:
    """The type of every tensor, in the order of the file."""
    if matrix is not None:
        require_match(matrix, source.weights.tensors)
    model = recipe_model(source.spec)
    changes = []
    for name, info in source.weights.tensors.items():
        if not is_quantizable(info):
            # llama.cpp reads norms, biases and routers as F32 only; a GGUF source has them as they should be.
            type = info.type if source.is_gguf else TensorType.F32
            changes.append(TensorChange(info, type, type))
            continue
        has_imatrix = matrix is not None
        wanted = MIXES[mix] if options.pure else wanted_type(mix, info, model, has_imatrix=has_imatrix)
        type = fitting_type(wanted, info.shape[-1])
        is_weighted = matrix is not None and name in matrix.entries and type not in (*FLOATS, TensorType.Q8_0)
        changes.append(TensorChange(info, wanted, type, is_weighted))
    return changes


def recipe_model(spec: ModelSpec) -> RecipeModel:
    """What recipes look at."""
    attention, ffn = spec.blocks[0].attention, spec.blocks[0].feed_forward
    return RecipeModel(
        num_layers=len(spec.blocks),
        queries_per_kv_head=attention.num_heads // attention.num_kv_heads,
        num_experts=ffn.num_experts if isinstance(ffn, MixtureOfExperts) else 0,
        is_tied=spec.head is not None and spec.head.tied,
    )


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


def _metadata(stored: Mapping[str, Any], mix: str, matrix: ImportanceMatrix | None) -> dict[str, Any]:
    changed: dict[str, Any] = {
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": FILE_TYPES[mix],
    }
    if matrix is not None:
        changed |= {
            "quantize.imatrix.file": os.path.basename(matrix.path),
            "quantize.imatrix.dataset": ", ".join(matrix.datasets),
            "quantize.imatrix.entries_count": len(matrix.entries),
            "quantize.imatrix.chunks_count": matrix.num_chunks,
        }
        if matrix.digests:
            changed[DIGESTS] = list(matrix.digests)
    return {**stored, **changed}


def _refuse_requantizing(weights: WeightSource, changes: list[TensorChange], options: QuantizeOptions) -> None:
    """A second rounding adds its error to the first one's, which a better source would not have."""
    lossy = [change for change in changes if not change.is_copy and change.source.type not in FLOATS]
    if lossy and not options.requantize:
        first = lossy[0].source
        raise ConfigError(
            f"{weights.path} is quantised already: {len(lossy):,} of its tensors, {first.name} ({first.type.name}) the "
            "first, would be rounded a second time and keep the errors of both; start from F16, BF16 or F32, "
            "or confirm with requantize (--requantize)"
        )


def _labelled(progress: OnProgress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, label)
