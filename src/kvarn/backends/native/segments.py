"""Weights whose token embeddings are there twice: for tokens of the first text, and moved to the type of the second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.weights import TensorInfo, TensorType, WeightSource

TOKENS, TYPES = "token_embd.weight", "token_types.weight"


class SegmentedWeights:
    """A WeightSource with token_embd = [E, E + types[1] - types[0]], always F32; types[0] is added to both later."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        tokens = source.tensors[TOKENS]
        doubled = replace(tokens, type=TensorType.F32, shape=(2 * tokens.shape[0], tokens.shape[1]))
        self.tensors: Mapping[str, TensorInfo] = {**source.tensors, TOKENS: doubled}

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._source.metadata

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.array(name).reshape(-1).view(np.uint8) if name == TOKENS else self._source.raw(name)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        if name != TOKENS:
            return self._source.array(name)
        tokens, types = self._source.array(TOKENS), self._source.array(TYPES)
        return np.concatenate([tokens, tokens + (types[1] - types[0])]).astype(np.float32)

    def forget(self, names: Iterable[str]) -> None:
        self._source.forget(names)

    def verify_unchanged(self) -> None:
        self._source.verify_unchanged()

    def close(self) -> None:
        self._source.close()
