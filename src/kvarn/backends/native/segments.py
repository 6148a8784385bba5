"""Weights whose token embeddings are there twice: for tokens of the first text, and moved to the type of the second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorType, WeightSource

TOKENS, TYPES = "token_embd.weight", "token_types.weight"


class SegmentedWeights(WeightProxy):
    """A WeightSource with token_embd = [E, E + types[1] - types[0]], always F32; types[0] is added to both later."""

    def __init__(self, source: WeightSource) -> None:
        tokens = source.tensors[TOKENS]
        doubled = replace(tokens, type=TensorType.F32, shape=(2 * tokens.shape[0], tokens.shape[1]))
        super().__init__(source, {TOKENS: doubled})

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.array(name).reshape(-1).view(np.uint8)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        tokens, types = self._source.array(name), self._source.array(TYPES)
        return np.concatenate([tokens, tokens + (types[1] - types[0])]).astype(np.float32)
