"""Matrices rounded with error feedback, layer by layer, kept in a file without a name until they are written.

The order of layers is the text's, the order of the new file its own; between them lies the spool.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarn.backends.native import _native
from kvarn.errors import ConfigError
from kvarn.evaluation.text import RunningText
from kvarn.formats.stored_grids import has_grid
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.hub import OnProgress
from kvarn.quantization.blocks import Bytes, Float32, requantized
from kvarn.quantization.gptq import ErrorFeedback
from kvarn.quantization.imatrix import ImportanceMatrix
from kvarn.quantization.moments import LayerInput, MomentCollector
from kvarn.quantization.report import TensorChange
from kvarn.quantization.storage_only.types import StorageOnlyType, WrittenType


@dataclass(frozen=True, slots=True)
class FeedbackJob:
    """What is rounded, from where, by which text. matrix: of the search for scales; without one, the text's own."""

    path: Path
    weights: WeightSource
    text: RunningText
    matrix: ImportanceMatrix | None
    threads: int
    progress: OnProgress | None

    def run(self, changes: tuple[TensorChange, ...], folder: Path) -> Spool:
        """Round every matrix of a layer whose type has a grid; the spool lies in the folder, without a name."""
        unknown = [change.type.name for change in changes if isinstance(change.type, StorageOnlyType)]
        if unknown:
            raise ConfigError(f"error feedback does not know {unknown[0]}; use another type, or another method")
        wanted = {change.source.name: change for change in changes if not change.is_copy and _has_grid(change.type)}
        spool, team = Spool(folder), _native.ThreadTeam(self.threads)
        with closing(MomentCollector(self.path, self.text, self.threads)) as collector:
            for band in collector.bands():
                inputs = [one for one in band if any(name in wanted for name in one.matrices)]
                for one, moments in collector.collect(inputs, self.progress).items():
                    self._round_input(one, moments, wanted, spool, team)
        if not spool.names and wanted:
            raise ConfigError(
                f"error feedback found none of the {len(wanted):,} matrices of {self.weights.path} in its layers; "
                "use rtn"
            )
        return spool

    def _round_input(
        self,
        input: LayerInput,
        moments: Float32,
        wanted: Mapping[str, TensorChange],
        spool: Spool,
        team: _native.ThreadTeam,
    ) -> None:
        feedback = ErrorFeedback(moments)
        for name in input.matrices:
            change = wanted.get(name)
            if change is None:
                continue
            known = None if self.matrix is None else self.matrix.entries.get(name)
            importance = np.ascontiguousarray(moments.diagonal()) if known is None else known.importance
            assert isinstance(change.type, TensorType)
            pieces = requantized(self.weights.raw(name), change.source, change.type, importance, team)
            stored = np.concatenate(list(pieces))
            spool.add(name, feedback.rounded(self.weights.array(name), stored, change.type))
            self.weights.release_pages((name,))


def _has_grid(type: WrittenType) -> bool:
    return isinstance(type, TensorType) and has_grid(type)


class Spool:
    """Bytes by name on disk; the system frees them when the process ends, however it does."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the spool
        self._places: dict[str, tuple[int, int]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def add(self, name: str, data: Bytes) -> None:
        self._places[name] = self._file.seek(0, 2), data.nbytes
        self._file.write(data.data)

    def read(self, name: str) -> Bytes:
        start, size = self._places[name]
        self._file.seek(start)
        return np.frombuffer(self._file.read(size), np.uint8)

    def close(self) -> None:
        self._file.close()
