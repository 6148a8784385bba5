"""The model to quantise, whatever its format: tensors under GGUF's names and the metadata a GGUF file of it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.splits import SplitGGUF
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec
from kvarn.quantization.convert import ConvertedFolder


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An open model. metadata(): what the GGUF file is to say, made when it is asked for."""

    weights: WeightSource
    spec: ModelSpec
    metadata: Callable[[], Mapping[str, Any]]
    num_bytes: int

    @property
    def is_gguf(self) -> bool:
        return not isinstance(self.weights, ConvertedFolder)

    def close(self) -> None:
        self.weights.close()


def open_source(path: Path) -> ModelSource:
    """Open a model and check it as the loader does."""
    opened = open_weights(path)
    try:
        description = describe(opened)
        if isinstance(opened, GGUFFile | SplitGGUF):
            return ModelSource(opened, description.spec, lambda: gguf_metadata(opened), opened.num_bytes)
        converted = ConvertedFolder(opened, description)
        num_bytes = sum(info.num_bytes for info in opened.tensors.values())
        return ModelSource(converted, description.spec, lambda: converted.metadata, num_bytes)
    except BaseException:
        opened.close()
        raise


def gguf_metadata(source: GGUFFile | SplitGGUF) -> dict[str, Any]:
    """A GGUF file's metadata as it is, but for the alignment, which the writer has to read."""
    metadata: dict[str, Any] = dict(source.stored_metadata())
    if "general.alignment" in metadata:
        metadata["general.alignment"] = int(source.metadata["general.alignment"])
    return metadata
