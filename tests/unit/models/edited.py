"""A weight source with other metadata and shapes than its file has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import TensorInfo, TensorType, WeightSource


class Edited:
    """A source with other metadata and other tensor shapes; None removes."""

    def __init__(
        self,
        source: WeightSource,
        metadata: Mapping[str, Any] | None = None,
        shapes: Mapping[str, tuple[int, ...] | None] | None = None,
    ) -> None:
        self.source = source
        changed = {**source.metadata, **(metadata or {})}
        self.metadata = {key: value for key, value in changed.items() if value is not None}
        tensors = dict(source.tensors)
        for name, shape in (shapes or {}).items():
            tensors.pop(name, None)
            if shape is not None:
                tensors[name] = TensorInfo(name, TensorType.F32, shape)
        self.tensors = tensors

    @property
    def path(self) -> str:
        return self.source.path

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.source.raw(name)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        return self.source.array(name)

    def release_pages(self, names: Iterable[str]) -> None:
        self.source.release_pages(names)

    def verify_unchanged(self) -> None:
        self.source.verify_unchanged()

    def close(self) -> None:
        self.source.close()


def edited_config(source: WeightSource, **changes: Any) -> Edited:
    config = {key: value for key, value in {**source.metadata["hf"], **changes}.items() if value is not None}
    return Edited(source, {"hf": config})
