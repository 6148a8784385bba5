"""What was measured of a source, kept in a file: for another size of it, and to go on after an interruption.

The file names what its figures depend on, the weights, the text and the importance; for anything else it is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.errors import ConfigError, FormatError
from kvarn.evaluation.text import RunningText
from kvarn.formats.gguf.new_file import NewFile
from kvarn.formats.strict_json import read_object
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.quantization.allocation.candidates import TypeCandidate
from kvarn.quantization.imatrix import ImportanceMatrix

VERSION = 2
SAMPLE_BYTES = 1 << 12  # of each tensor's middle


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """The types a tensor may get, with their errors; kl_per_error: None where the loaded model has it not."""

    candidates: tuple[TypeCandidate, ...]
    kl_per_error: float | None


class MeasuredFile:
    """Figures by tensor, written to disk as they come."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self.figures: dict[str, TensorFigures] = {}
        if path.exists():
            self._read()

    def add(self, name: str, figures: TensorFigures) -> None:
        """Keep what was found of a tensor."""
        self.figures[name] = figures
        tensors = {n: _plain(f) for n, f in self.figures.items()}
        document = {"version": VERSION, "key": self._key, "sha256": _sha256(tensors), "tensors": tensors}
        with closing(NewFile(self._path.parent)) as new:
            new.file.write(json.dumps(document).encode())
            new.publish(self._path)

    def _read(self) -> None:
        document = read_object(str(self._path))
        if document.get("version") != VERSION or document.get("key") != self._key:
            raise ConfigError(
                f"{self._path} was measured of another source, text or imatrix, or by another version; give the name "
                "of a new file, or delete this one"
            )
        if document.get("sha256") != _sha256(document.get("tensors")):
            raise FormatError("the figures are not those that were written; delete it", file=str(self._path))
        try:
            self.figures = {name: _figures(entry) for name, entry in document["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError("this is no file of measured tensors; delete it", file=str(self._path)) from None


def measured_key(
    weights: WeightSource, tensors: Iterable[TensorInfo], text: RunningText, matrix: ImportanceMatrix | None
) -> str:
    """sha256 of what the figures depend on: some bytes of every tensor, the texts, the importance."""
    digest = hashlib.sha256(json.dumps(text.digests).encode())
    for info in tensors:
        raw = weights.raw(info.name)
        middle = max(0, len(raw) // 2 - SAMPLE_BYTES // 2)
        digest.update(f"{info.name} {info.type.name} {info.shape}".encode())
        digest.update(raw[middle : middle + SAMPLE_BYTES].tobytes())
        known = None if matrix is None else matrix.entries.get(info.name)
        digest.update(b"" if known is None else known.importance.tobytes())
    return digest.hexdigest()


def _sha256(tensors: object) -> str:
    """A digit that a disk has changed would change a choice, and nothing else would tell."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def _plain(figures: TensorFigures) -> dict[str, Any]:
    types = [[one.type.name, one.num_bytes, one.error] for one in figures.candidates]
    return {"types": types, "kl_per_error": figures.kl_per_error}


def _figures(entry: Mapping[str, Any]) -> TensorFigures:
    types = tuple(TypeCandidate(TensorType[name], int(size), float(error)) for name, size, error in entry["types"])
    value = entry["kl_per_error"]
    return TensorFigures(types, None if value is None else float(value))
