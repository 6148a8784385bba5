"""The type of every tensor of a new file: by a mix of llama.cpp's, or by measurement for a size."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvarn.backends.native import _native
from kvarn.errors import ConfigError
from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import RunningText
from kvarn.formats.gguf.writer import Streamed, alignment_of, gguf_size, padded
from kvarn.formats.weights import TensorInfo, TensorType, conversions
from kvarn.hub import OnProgress
from kvarn.models.spec import Attention, LatentAttention, MixtureOfExperts, ModelSpec
from kvarn.quantization.allocation.allocate import Budget, Measurement, SizeTarget, allocate
from kvarn.quantization.allocation.candidates import fitting_types
from kvarn.quantization.allocation.measured_file import MeasuredFile, measured_key
from kvarn.quantization.allocation.probe import DivergenceProbe
from kvarn.quantization.blocks import FLOATS
from kvarn.quantization.collect import ImatrixOptions, imatrix_of
from kvarn.quantization.imatrix import ImportanceMatrix
from kvarn.quantization.recipes import (
    FILE_TYPES,
    MIXES,
    RecipeModel,
    fitting_type,
    is_quantizable,
    mix_name,
    wanted_type,
)
from kvarn.quantization.report import TensorChange
from kvarn.quantization.source import ModelSource
from kvarn.quantization.storage_only.types import WrittenType

IMATRIX_CHUNKS, IMATRIX_CONTEXT = 32, 512  # collected on the text of a size, where no matrix was given


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """All tensors in the order of the file. kl: mean divergence on the text of a size."""

    mix: str
    file_type: int
    changes: tuple[TensorChange, ...]
    kl: float | None = None


def plan_mix(source: ModelSource, mix: str, matrix: ImportanceMatrix | None, *, pure: bool) -> QuantizationPlan:
    """Types as llama.cpp's mix has them; pure: its base type for every matrix."""
    model = recipe_model(source.spec)
    changes = []
    for info in source.weights.tensors.values():
        if not is_quantizable(info):
            changes.append(_unchanged(source, info))
            continue
        wanted = MIXES[mix] if pure else wanted_type(mix, info, model, has_imatrix=matrix is not None)
        changes.append(_change(info, wanted, fitting_type(wanted, info.shape[-1]), matrix))
    return QuantizationPlan(mix, FILE_TYPES[mix], tuple(changes))


@dataclass(frozen=True, slots=True)
class SizePlanner:
    """A size to hit for one source; text: what divergence is measured on, of these files."""

    path: Path
    target: SizeTarget
    text: RunningText
    threads: int
    progress: OnProgress | None
    measures_result: bool = True  # run the whole choice at the end, as it will be written
    measured: Path | None = None  # keeps what was measured, for other sizes

    def plan(self, source: ModelSource, metadata: dict[str, Any], matrix: ImportanceMatrix) -> QuantizationPlan:
        """Measure, then choose the types."""
        matrices = [info for info in source.weights.tensors.values() if is_quantizable(info)]
        budget = self._budget(source, metadata)
        team = _native.ThreadTeam(self.threads)
        kept = None
        if self.measured is not None:
            kept = MeasuredFile(self.measured, measured_key(source.weights, matrices, self.text, matrix))
        with closing(DivergenceProbe(self.path, self.text, self.threads)) as probe:
            measurement = Measurement(probe, matrix, team)
            types = allocate(measurement.run(source.weights, matrices, self.progress, kept), budget)
            kl = measurement.divergence(types) if self.measures_result else None
        changes = [
            _change(info, types[info.name], types[info.name], matrix)
            if info.name in types
            else _unchanged(source, info)
            for info in source.weights.tensors.values()
        ]
        return QuantizationPlan(str(self.target), _file_type(changes), tuple(changes), kl)

    def check(self, source: ModelSource, metadata: dict[str, Any]) -> None:
        """Refuse a size that is too small, before anything is measured."""
        self._budget(source, metadata)

    def imatrix_facts(self) -> ImportanceMatrix:
        """What a file will say of imatrix(), before there is one."""
        return ImportanceMatrix({}, self.text.names, self.text.digests)

    def imatrix(self) -> ImportanceMatrix:
        """An importance matrix of the text itself."""
        options = ImatrixOptions(IMATRIX_CHUNKS, fitting_context(self.path, IMATRIX_CONTEXT), self.threads)
        return imatrix_of(self.path, self.text, options, self.progress)

    def _budget(self, source: ModelSource, metadata: dict[str, Any]) -> Budget:
        """What is left for the matrices when everything else has its place."""
        infos = list(source.weights.tensors.values())
        matrices = [info for info in infos if is_quantizable(info)]
        others = [info for info in infos if not is_quantizable(info)]
        if self.target.num_bytes is None:
            assert self.target.bits_per_weight is not None
            fixed = sum(_kept_type(source, info).num_bytes(info.num_values) for info in others)
            values = sum(info.num_values for info in infos)
            limit = int(self.target.bits_per_weight * values / 8)

            def bits(least: int) -> str:
                return f"{math.ceil(8e3 * (fixed + least) / values) / 1e3:g} bits per weight"

            budget = Budget(limit - fixed, _bytes, bits)
        else:
            alignment = alignment_of(metadata)
            kept = {
                info.name: Streamed(
                    fitting_types(info)[0] if is_quantizable(info) else _kept_type(source, info), info.shape, tuple
                )
                for info in infos
            }
            fixed = gguf_size(metadata, kept) - sum(padded(kept[info.name].num_bytes, alignment) for info in matrices)
            budget = Budget(
                self.target.num_bytes - fixed,
                lambda info, type: padded(_bytes(info, type), alignment),
                lambda least: f"{fixed + least:,} bytes",
            )
        budget.require_possible(matrices)
        return budget


def refuse_requantizing(source: ModelSource, infos: list[TensorInfo], *, confirmed: bool) -> None:
    """A second rounding adds its error to the first one's, which a better source would not have."""
    lossy = [info for info in infos if info.type not in FLOATS]
    if infos and not lossy and conversions(source.weights) and not confirmed:
        raise ConfigError(
            f"{source.weights.path} is quantised already ({conversions(source.weights)[0]:.200}), and would be rounded "
            "a second time; start from F16, BF16 or F32, or confirm with requantize (--requantize)"
        )
    if lossy and not confirmed:
        first = lossy[0]
        raise ConfigError(
            f"{source.weights.path} is quantised already: {len(lossy):,} of its tensors, {first.name} "
            f"({first.type.name}) the first, would be rounded a second time and keep the errors of both; start from "
            "F16, BF16 or F32, or confirm with requantize (--requantize)"
        )


def recipe_model(spec: ModelSpec) -> RecipeModel:
    """What recipes look at."""
    ffn = spec.blocks[0].feed_forward
    return RecipeModel(
        num_layers=len(spec.blocks),
        queries_per_kv_head=_queries_per_kv_head(spec),
        num_experts=ffn.num_experts if isinstance(ffn, MixtureOfExperts) else 0,
        is_tied=spec.head is not None and spec.head.tied,
    )


def _queries_per_kv_head(spec: ModelSpec) -> int:
    """Of the first layer that has heads; all heads of latent attention read one."""
    for block in spec.blocks:
        if isinstance(block.mixer, Attention):
            return block.mixer.num_heads // block.mixer.num_kv_heads
        if isinstance(block.mixer, LatentAttention):
            return block.mixer.num_heads
    return 1


def _change(info: TensorInfo, wanted: WrittenType, type: WrittenType, matrix: ImportanceMatrix | None) -> TensorChange:
    change = TensorChange(info, wanted, type)
    return replace(change, is_weighted=matrix is not None and info.name in matrix.entries and change.could_be_weighted)


def _unchanged(source: ModelSource, info: TensorInfo) -> TensorChange:
    kept = _kept_type(source, info)
    return TensorChange(info, kept, kept)


def _kept_type(source: ModelSource, info: TensorInfo) -> TensorType:
    # llama.cpp reads norms, biases and routers as F32 only; a GGUF source has them as they should be.
    return info.type if source.is_gguf else TensorType.F32


def _bytes(info: TensorInfo, type: TensorType) -> int:
    return type.num_bytes(info.num_values)


def _file_type(changes: list[TensorChange]) -> int:
    """GGUF's number of the type that most values have."""
    values: dict[WrittenType, int] = {}
    for change in changes:
        values[change.type] = values.get(change.type, 0) + change.source.num_values
    return FILE_TYPES[mix_name(max(values, key=lambda type: values[type]).name)]
