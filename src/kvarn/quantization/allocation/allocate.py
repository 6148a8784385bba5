"""Types for a size: every tensor is rounded alone, what that does to the predictions is measured, and the types are
chosen whose measured divergences have the least sum. The model is loaded meanwhile, in its own types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvarn.backends.native import _native
from kvarn.checks import check_parameter
from kvarn.errors import ConfigError
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.hub import OnProgress
from kvarn.quantization.allocation.candidates import TypeCandidate, candidates, fitting_types
from kvarn.quantization.allocation.choose import SizedOption, choose
from kvarn.quantization.allocation.measured_file import MeasuredFile, TensorFigures
from kvarn.quantization.allocation.probe import DivergenceProbe, Replacement
from kvarn.quantization.blocks import requantized
from kvarn.quantization.imatrix import ImportanceMatrix

PROBED_BITS = 4.6  # the largest type of at most so many bits is measured; the others follow by their errors
MAX_BITS_PER_WEIGHT = 32.0


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """A size to hit from below: num_bytes of the file, or bits_per_weight of its tensors."""

    num_bytes: int | None = None
    bits_per_weight: float | None = None

    def __post_init__(self) -> None:
        if (self.num_bytes is None) == (self.bits_per_weight is None):
            raise ConfigError("a size is given either in bytes or in bits per weight; give exactly one of them")
        check_parameter.integer("bytes", self.num_bytes, 1, 1 << 60, optional=True)
        check_parameter.number("bpw", self.bits_per_weight, 0.1, MAX_BITS_PER_WEIGHT, optional=True)

    def __str__(self) -> str:
        return f"{self.bits_per_weight:g} bits per weight" if self.num_bytes is None else f"{self.num_bytes:,} bytes"


@dataclass(frozen=True, slots=True)
class Budget:
    """num_bytes for all tensors, of which `size` says what each takes in a type.

    told: what has to be asked for, to have so many bytes for them.
    """

    num_bytes: int
    size: Callable[[TensorInfo, TensorType], int]
    told: Callable[[int], str]

    def require_possible(self, tensors: Iterable[TensorInfo]) -> None:
        """Refuse a budget below what the smallest types take."""
        infos = list(tensors)
        least = sum(min(self.size(info, type) for type in fitting_types(info)) for info in infos)
        if least > self.num_bytes:
            raise ConfigError(
                f"the size is too small by {least - self.num_bytes:,} bytes: {len(infos):,} matrices take at least "
                f"{least:,} bytes in the smallest types that fit them, {max(0, self.num_bytes):,} are left for them; "
                f"give at least {self.told(least)}"
            )


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """A tensor with what each type costs: KL in nats on the text, of the rounding of this tensor alone."""

    info: TensorInfo
    candidates: tuple[TypeCandidate, ...]
    kl_per_error: float

    def options(self, budget: Budget) -> list[SizedOption]:
        return [
            SizedOption(budget.size(self.info, candidate.type), candidate.error * self.kl_per_error)
            for candidate in self.candidates
        ]


def allocate(measured: list[MeasuredTensor], budget: Budget) -> dict[str, TensorType]:
    """The types of least divergence within the budget."""
    chosen = choose([tensor.options(budget) for tensor in measured], budget.num_bytes)
    return {tensor.info.name: tensor.candidates[index].type for tensor, index in zip(measured, chosen, strict=True)}


class Measurement:
    """The divergence that each tensor's rounding causes, one after another, on a loaded source."""

    def __init__(self, probe: DivergenceProbe, matrix: ImportanceMatrix | None, team: _native.ThreadTeam) -> None:
        self._probe, self._matrix, self._team = probe, matrix, team

    def run(
        self,
        weights: WeightSource,
        tensors: list[TensorInfo],
        progress: OnProgress | None,
        kept: MeasuredFile | None = None,
    ) -> list[MeasuredTensor]:
        """Measure tensors of a file; those that the loaded model has under another name get a middling figure.

        kept: what was measured before, and where what is measured now goes.
        """
        found: dict[str, TensorFigures] = {} if kept is None else dict(kept.figures)
        for number, info in enumerate(tensors):
            if info.name not in found:
                choices = candidates(weights, info, self._importance(info), self._team)
                found[info.name] = TensorFigures(tuple(choices), self._sensitivity(info, choices))
                if kept is not None:
                    kept.add(info.name, found[info.name])
            if progress is not None:
                progress(number + 1, len(tensors), "measuring")
        usual = median([one.kl_per_error for one in found.values() if one.kl_per_error is not None] or [1.0])
        return [
            MeasuredTensor(info, one.candidates, usual if one.kl_per_error is None else one.kl_per_error)
            for info in tensors
            for one in (found[info.name],)
        ]

    def divergence(self, types: Mapping[str, TensorType]) -> float:
        """Mean KL on the text with all these tensors in these types."""
        replaced = {}
        for name, type in types.items():
            if name not in self._probe.names:
                continue
            info = self._probe.weights.tensors[name]
            if info.type is not type:
                replaced[name] = Replacement(type, self._quantized(info, type))
        return self._probe.full_divergence(replaced) if replaced else 0.0

    def _sensitivity(self, info: TensorInfo, choices: list[TypeCandidate]) -> float | None:
        """KL for each unit of error."""
        lossy = [choice for choice in choices if choice.error > 0]
        if info.name not in self._probe.names or not lossy:
            return None
        small = [choice for choice in lossy if 8 * choice.num_bytes <= PROBED_BITS * info.num_values]
        probed = small[-1] if small else lossy[0]
        stored = self._probe.weights.tensors[info.name]
        values = dequantize(self._quantized(stored, probed.type), probed.type, stored.shape)
        # As F16: with a block type the core would also round what the matrix reads.
        replaced = Replacement(TensorType.F16, quantize(values, TensorType.F16))
        return self._probe.divergence({info.name: replaced}) / probed.error

    def _quantized(self, info: TensorInfo, type: TensorType) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        weights = self._probe.weights
        pieces = list(requantized(weights.raw(info.name), info, type, self._importance(info), self._team))
        weights.release_pages((info.name,))
        return np.concatenate(pieces)

    def _importance(self, info: TensorInfo) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        known = None if self._matrix is None else self._matrix.entries.get(info.name)
        return None if known is None else known.importance
