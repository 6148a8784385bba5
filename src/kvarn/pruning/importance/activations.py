"""What flows through a model on a text: the states between layers, and moments of what ffn_down and attn_output read.

Moments lie in a file without a name, so that a large model needs no memory for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.evaluation.text import RunningText
from kvarn.hub import OnProgress
from kvarn.quantization.moments import LayerInput, MomentCollector

Float32 = npt.NDArray[np.float32]
INPUTS = ("attention_output", "ffn_down")


@dataclass(frozen=True, slots=True)
class InputMoments:
    """Of one input over the text: mean (columns), E[x x^T] (columns, columns)."""

    mean: Float32
    moments: Float32

    @property
    def squares(self) -> Float32:
        return np.ascontiguousarray(self.moments.diagonal())

    @property
    def covariance(self) -> Float32:
        return self.moments - np.outer(self.mean, self.mean)


class Activations:
    """Moments by layer and input, and the mean squares of what each matrix reads.

    collect: fills it when something is asked for; layers alone go without it.
    """

    def __init__(self, folder: Path, collect: Callable[[Activations], None] | None = None) -> None:
        self._collect = collect
        self._importance: dict[str, Float32] = {}
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the moments
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        self._means: dict[tuple[int, str], Float32] = {}

    def __getitem__(self, key: tuple[int, str]) -> InputMoments:
        self._fill()
        start, columns = self._places[key]
        self._file.seek(start)
        data = np.frombuffer(self._file.read(4 * columns * columns), np.float32)
        return InputMoments(self._means[key], data.reshape(columns, columns))

    def of_matrix(self, name: str) -> Float32 | None:
        """The moments of what a matrix reads, None where they were not kept."""
        _, layer, kind, _ = name.split(".")
        input = {"ffn_down": "ffn_down", "attn_output": "attention_output"}.get(kind)
        return None if input is None else self[int(layer), input].moments

    def importance(self, name: str) -> Float32 | None:
        """The mean square of each column that a matrix reads."""
        self._fill()
        return self._importance.get(name)

    def add(self, one: LayerInput, mean: Float32, moments: Float32) -> None:
        key = one.layer, one.name
        self._places[key] = self._file.seek(0, 2), one.columns
        self._file.write(np.ascontiguousarray(moments).data)
        self._means[key] = mean

    def add_importance(self, one: LayerInput, squares: Float32) -> None:
        self._importance |= dict.fromkeys(one.matrices, squares)

    def _fill(self) -> None:
        collect, self._collect = self._collect, None
        if collect is not None:
            collect(self)

    def close(self) -> None:
        self._file.close()


def collect_activations(
    path: Path, text: RunningText, folder: Path, threads: int, progress: OnProgress | None
) -> Activations:
    """What both inputs of every layer are on a text, run through the model when it is first asked for."""

    def collect(found: Activations) -> None:
        with closing(MomentCollector(path, text, threads)) as collector:
            for band in collector.bands():
                inputs = [one for one in band if one.name in INPUTS]
                for one, moments in collector.collect(inputs, progress).items():
                    found.add(one, collector.means[one], moments)
                for one in band:
                    found.add_importance(one, collector.squares(one))

    return Activations(folder, collect)
