"""A WeightSource that delegates to another one: the base class of those that change some tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import Float8Matrix, TensorInfo, WeightSource, conversions, float8_of


class WeightProxy:
    """The weights of another source; those in `changed` have another type or shape and come from the subclass."""

    def __init__(self, source: WeightSource, changed: Mapping[str, TensorInfo]) -> None:
        self._source = source
        self._changed = changed
        self.tensors: Mapping[str, TensorInfo] = {**source.tensors, **changed}

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._source.metadata

    @property
    def conversions(self) -> tuple[str, ...]:
        return conversions(self._source)

    def float8(self, name: str) -> Float8Matrix | None:
        return None if name in self._changed else float8_of(self._source, name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self._changed_raw(name) if name in self._changed else self._source.raw(name)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        return self._changed_array(name) if name in self._changed else self._source.array(name)

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages(names)

    def verify_unchanged(self) -> None:
        self._source.verify_unchanged()

    def close(self) -> None:
        self._source.close()

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        raise NotImplementedError
