"""Importance matrices in llama.cpp's GGUF form: how large the inputs of every matrix are, column by column.

`NAME.in_sum2` (matrices, columns) is the sum of x^2 over the tokens seen and `NAME.counts` (matrices, 1) their number,
both F32; a stack of experts has one row for each. Further statistics of our own lie beside them, as `NAME.in_max` and
`NAME.in_sum_abs`; other programs skip what they do not know.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.errors import FormatError
from kvarn.evaluation.text import DIGESTS, calibration_digests
from kvarn.formats.gguf.splits import open_gguf
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.weights import TensorInfo, WeightSource

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Of the inputs of one matrix, or of each expert of a stack, over `counts` tokens: all (matrices, columns)."""

    sum_squares: Float32
    counts: Float32  # (matrices)
    sum_magnitudes: Float32 | None = None
    largest: Float32 | None = None

    @property
    def importance(self) -> Float32:
        """The mean square of each column; 1 for matrices that no token has reached."""
        counts = self.counts[:, None]
        with np.errstate(over="ignore"):
            seen = np.divide(self.sum_squares, counts, out=np.ones_like(self.sum_squares), where=counts > 0)
        return seen[0] if len(seen) == 1 else seen


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """Statistics by the name of the weight; digests: sha256 of the texts they were taken on."""

    entries: Mapping[str, InputStatistics] = field(repr=False)  # many thousands of numbers
    datasets: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    num_chunks: int = 0
    chunk_size: int = 0
    path: str = field(default="", compare=False)
    unobserved: tuple[str, ...] = field(default=(), compare=False)  # matrices of layers without statistics, when made


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read a file of `kvarn imatrix` or of llama-imatrix (in its GGUF form)."""
    source = open_gguf(path)
    try:
        metadata = source.metadata
        if metadata.get("general.type") != "imatrix":
            raise FormatError(
                f"general.type is {metadata.get('general.type')!r}, not 'imatrix'; give a file of `kvarn imatrix` "
                "or llama-imatrix",
                file=source.path,
            )
        names = [name.removesuffix(".in_sum2") for name in source.tensors if name.endswith(".in_sum2")]
        return ImportanceMatrix(
            entries={name: _statistics(source, name) for name in names},
            datasets=_texts(metadata.get("imatrix.datasets", ())),
            digests=calibration_digests(metadata),
            num_chunks=_count(source, "imatrix.chunk_count"),
            chunk_size=_count(source, "imatrix.chunk_size"),
            path=source.path,
        )
    finally:
        source.close()


def write_imatrix(path: str | os.PathLike[str], matrix: ImportanceMatrix) -> None:
    """Write the file, whole or not at all."""
    metadata: dict[str, Any] = {
        "general.type": "imatrix",
        "imatrix.chunk_count": matrix.num_chunks,
        "imatrix.chunk_size": matrix.chunk_size,
    }
    texts = {"imatrix.datasets": matrix.datasets, DIGESTS: matrix.digests}
    metadata |= {key: list(value) for key, value in texts.items() if value}  # an empty array has no type
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, found in matrix.entries.items():
        tensors[f"{name}.in_sum2"] = found.sum_squares
        tensors[f"{name}.counts"] = found.counts[:, None]
        if found.sum_magnitudes is not None and found.largest is not None:
            tensors[f"{name}.in_sum_abs"] = found.sum_magnitudes
            tensors[f"{name}.in_max"] = found.largest
    write_gguf(Path(path), metadata, tensors)


def merged(first: ImportanceMatrix, second: ImportanceMatrix) -> ImportanceMatrix:
    """Both together, as if one pass had seen both texts."""
    _require_same_chunks(first, second)
    names = [*first.entries, *(name for name in second.entries if name not in first.entries)]
    return ImportanceMatrix(
        entries={name: _sum(name, first.entries.get(name), second.entries.get(name)) for name in names},
        datasets=_union(first.datasets, second.datasets),
        digests=_union(first.digests, second.digests),
        num_chunks=first.num_chunks + second.num_chunks,
        chunk_size=first.chunk_size,
    )


def require_mergeable(matrix: ImportanceMatrix, own: ImportanceMatrix, known: Collection[str]) -> None:
    """Refuse a file to add that is of another model, or of other chunks, before a text is run for it.

    own: the statistics of this model, however few tokens they saw; known: matrices that it has beside these.
    """
    _require_same_chunks(own, matrix)
    for name, found in matrix.entries.items():
        mine = own.entries.get(name)
        if mine is None and name not in known:
            problem = f"it has statistics of {name}, which this model does not have"
        elif mine is not None and found.sum_squares.shape != mine.sum_squares.shape:
            problem = f"its statistics of {name} are {found.sum_squares.shape}, this model's {mine.sum_squares.shape}"
        else:
            continue
        raise FormatError(f"{problem}; merge matrices of one model", file=matrix.path)
    layers = {name.split(".")[1] for name in matrix.entries if name.startswith("blk.")}
    for name in own.entries:
        if name.startswith("blk.") and name.split(".")[1] not in layers:
            problem = f"it has no statistics of {name} nor of any other matrix of that layer"
            raise FormatError(f"{problem}; merge matrices of one model", file=matrix.path)


def _require_same_chunks(first: ImportanceMatrix, second: ImportanceMatrix) -> None:
    if first.chunk_size != second.chunk_size:
        raise FormatError(
            f"the chunks of {first.path or 'one matrix'} have {first.chunk_size:,} tokens, those of "
            f"{second.path or 'the other'} {second.chunk_size:,}; merge matrices of one size"
        )


def require_match(matrix: ImportanceMatrix, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a matrix of another model: names that this one lacks, other widths, or layers that it lacks itself."""
    for name, found in matrix.entries.items():
        info = tensors.get(name)
        if info is None:
            raise FormatError(
                f"it has statistics of {name}, which this model does not have; give the imatrix of this model",
                file=matrix.path,
            )
        experts = info.shape[0] if len(info.shape) == 3 else 1
        if found.sum_squares.shape != (experts, info.shape[-1]):
            raise FormatError(
                f"its statistics of {name} are {found.sum_squares.shape}, the model's matrix needs "
                f"{(experts, info.shape[-1])}; give the imatrix of this model",
                file=matrix.path,
            )
    missing = _layer_without_statistics(matrix, tensors)
    if missing is not None:
        raise FormatError(
            f"it has no statistics of {missing} nor of any other matrix of that layer, but of such matrices of other "
            "layers; give the imatrix of this model",
            file=matrix.path,
        )


def _layer_without_statistics(matrix: ImportanceMatrix, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The first matrix of a layer that has none, though others have of such matrices.

    Layers that predict further tokens (nextn) are not run, recurrent ones have other matrices, and an expert that no
    token reached may lack its own.
    """
    known = {_kind(name) for name in matrix.entries}
    layers: dict[str, list[str]] = {}
    for name in tensors:
        if name.startswith("blk.") and (_kind(name) in known or ".nextn." in name):
            layers.setdefault(name.split(".")[1], []).append(name)
    for names in layers.values():
        if not any(name in matrix.entries or ".nextn." in name for name in names):
            return names[0]
    return None


def _kind(name: str) -> str:
    return name.split(".", 2)[-1]


def _statistics(source: WeightSource, name: str) -> InputStatistics:
    def values(suffix: str) -> Float32 | None:
        return source.array(f"{name}.{suffix}") if f"{name}.{suffix}" in source.tensors else None

    squares, counts = values("in_sum2"), values("counts")
    if squares is None or counts is None or counts.size != len(np.atleast_2d(squares)):
        raise FormatError(f"{name} needs in_sum2 and one of counts for each matrix", file=source.path)
    squares = np.atleast_2d(squares)
    if not (np.isfinite(squares).all() and np.isfinite(counts).all() and (squares >= 0).all() and (counts >= 0).all()):
        raise FormatError(f"the statistics of {name} are negative or not finite; make the file again", file=source.path)
    magnitudes, largest = values("in_sum_abs"), values("in_max")
    if any(more is not None and more.shape != squares.shape for more in (magnitudes, largest)):
        raise FormatError(f"the statistics of {name} differ in shape; make the file again", file=source.path)
    found = InputStatistics(squares, counts.reshape(-1), magnitudes, largest)
    if not np.isfinite(found.importance).all():
        raise FormatError(f"the statistics of {name} have means that are not finite; make it again", file=source.path)
    return found


def _count(source: WeightSource, key: str) -> int:
    value = source.metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FormatError(f"{key} is {short(value)}; expected a number", file=source.path)
    return value


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, Sequence) else ()


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _sum(name: str, first: InputStatistics | None, second: InputStatistics | None) -> InputStatistics:
    if first is None or second is None:
        found = first or second
        assert found is not None
        return found
    if first.sum_squares.shape != second.sum_squares.shape:
        raise FormatError(f"the matrices to merge differ in the width of {name}; they are of different models")
    has_all = first.largest is not None and second.largest is not None
    return InputStatistics(
        first.sum_squares + second.sum_squares,
        first.counts + second.counts,
        first.sum_magnitudes + second.sum_magnitudes
        if first.sum_magnitudes is not None and second.sum_magnitudes is not None
        else None,
        np.maximum(first.largest, second.largest)
        if has_all and first.largest is not None and second.largest is not None
        else None,
    )
