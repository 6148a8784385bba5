"""What flows through a model on a text: the states between layers, and moments of what ffn_down and attn_output read.

Moments lie in a file without a name, so that a large model needs no memory for them.
"""

from __future__ import annotations

import tempfile
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
    """Moments by layer and input. importance: the mean squares of what each matrix reads, by its name."""

    def __init__(self, folder: Path) -> None:
        self.importance: dict[str, Float32] = {}
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the moments
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        self._means: dict[tuple[int, str], Float32] = {}

    def __getitem__(self, key: tuple[int, str]) -> InputMoments:
        start, columns = self._places[key]
        self._file.seek(start)
        data = np.frombuffer(self._file.read(4 * columns * columns), np.float32)
        return InputMoments(self._means[key], data.reshape(columns, columns))

    def add(self, one: LayerInput, mean: Float32, moments: Float32) -> None:
        key = one.layer, one.name
        self._places[key] = self._file.seek(0, 2), one.columns
        self._file.write(np.ascontiguousarray(moments).data)
        self._means[key] = mean

    def close(self) -> None:
        self._file.close()


def collect_activations(
    path: Path, text: RunningText, folder: Path, threads: int, progress: OnProgress | None
) -> Activations:
    """Run the text through the model and keep the moments of both inputs of every layer."""
    found = Activations(folder)
    collector = MomentCollector(path, text, threads)
    try:
        for band in collector.bands():
            inputs = [one for one in band if one.name in INPUTS]
            for one, moments in collector.collect(inputs, progress).items():
                found.add(one, collector.means[one], moments)
            for one in band:
                found.importance |= dict.fromkeys(one.matrices, collector.squares(one))
    except BaseException:
        found.close()
        raise
    finally:
        collector.close()
    return found
