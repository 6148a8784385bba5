"""The file of a pruned model: its size before it is written, its metadata, and what is made of it afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import DIGESTS, calibration_digests, read_text
from kvarn.formats.gguf.new_file import NewFile
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Streamed, gguf_size, write_gguf, write_gguf_to
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.hub import OnProgress
from kvarn.pruning.cut import PrunedWeights
from kvarn.pruning.options import PruneOptions
from kvarn.quantization.allocation.allocate import SizeTarget
from kvarn.quantization.blocks import Bytes
from kvarn.quantization.collect import ImatrixOptions, imatrix_of
from kvarn.quantization.disk import require_room
from kvarn.quantization.plan import refuse_requantizing
from kvarn.quantization.quantize import QuantizeOptions, quantize
from kvarn.quantization.recipes import is_quantizable
from kvarn.quantization.source import ModelSource

LAYERS = "kvarn.pruning.layers"  # metadata: those of the source that stayed
IMATRIX_CHUNKS, IMATRIX_CONTEXT = 32, 256
COPIED_BYTES = 8 << 20  # at one time


@dataclass(frozen=True, slots=True)
class PrunedFile:
    """Where the weights of a cut go. digests: sha256 of the texts it was measured on."""

    path: Path
    source: ModelSource
    options: PruneOptions
    threads: int
    progress: OnProgress | None
    digests: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse to round a second time without having been asked to."""
        if self.options.then is not None:
            matrices = [info for info in self.source.weights.tensors.values() if is_quantizable(info)]
            refuse_requantizing(self.source, matrices, confirmed=self.options.requantize)

    def size(self, weights: PrunedWeights) -> int:
        """The bytes of a file of these weights."""
        return gguf_size(self._metadata(weights), {name: self._streamed(weights, name) for name in weights.tensors})

    def copy(self, output: Path) -> None:
        """The source as it is: byte by byte, where it is one GGUF file."""
        require_room(output, self.source.num_bytes)
        if not isinstance(self.source.weights, GGUFFile):
            self._write(output, self.source.weights, dict(self.source.metadata()))
            return
        with closing(NewFile(output.parent)) as new, open(self.path, "rb") as file:
            shutil.copyfileobj(file, new.file, COPIED_BYTES)
            new.publish(output)

    def write(self, output: Path, weights: PrunedWeights) -> None:
        """Write the weights, and quantise them where that was asked for."""
        metadata = self._metadata(weights)
        if self.options.then is None:
            self._write(output, weights, metadata)
            return
        tensors = self._tensors(output, weights)
        with closing(NewFile(output.parent)) as floats:
            write_gguf_to(floats.file, metadata, tensors, progress=self._show("pruned.gguf"))
            self._quantize(floats.path, self.options.then, output)

    def _quantize(self, floats: Path, then: str | SizeTarget, output: Path) -> None:
        few = ImatrixOptions(IMATRIX_CHUNKS, fitting_context(floats, IMATRIX_CONTEXT), self.threads)
        matrix = imatrix_of(floats, read_text(self.options.text), few, self.progress)
        chosen = QuantizeOptions(
            imatrix=replace(matrix, path="pruned.imatrix"),
            requantize=True,
            force=self.options.force,
            threads=self.threads,
            text=self.options.text if isinstance(then, SizeTarget) else (),
        )
        quantize(floats, then, output, options=chosen, progress=self.progress)

    def _metadata(self, weights: PrunedWeights) -> dict[str, Any]:
        """The source's, with the new shape, the texts it was measured on and the layers it is made of."""
        digests = dict.fromkeys([*calibration_digests(self.source.weights.metadata), *self.digests])
        told = {DIGESTS: list(digests), LAYERS: list(weights.layers)}
        return {**self.source.metadata(), **weights.hyperparameters, **told}

    def _write(self, output: Path, weights: WeightSource, metadata: dict[str, Any]) -> None:
        write_gguf(output, metadata, self._tensors(output, weights), progress=self._show(output.name))

    def _tensors(self, output: Path, weights: WeightSource) -> dict[str, Streamed]:
        """All that is written; a disk without room for it is refused."""
        tensors = {name: self._streamed(weights, name) for name in weights.tensors}
        require_room(output, sum(tensor.num_bytes for tensor in tensors.values()))
        return tensors

    def _show(self, label: str) -> Callable[[int, int], None] | None:
        progress = self.progress
        return None if progress is None else lambda done, total: progress(done, total, label)

    def _streamed(self, weights: WeightSource, name: str) -> Streamed:
        info = weights.tensors[name]
        # llama.cpp reads norms and biases as F32 only; a GGUF source has them as they should be.
        as_floats = not self.source.is_gguf and not is_quantizable(info)

        def make() -> Iterator[Bytes]:
            if as_floats:
                yield np.ascontiguousarray(weights.array(name), np.float32).reshape(-1).view(np.uint8)
            else:
                yield weights.raw(name)
            weights.release_pages((name,))
            weights.verify_unchanged()

        return Streamed(TensorType.F32 if as_floats else info.type, info.shape, make)
