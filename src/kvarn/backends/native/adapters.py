"""LoRA adapters in the form that the core takes: flat values of one type, pair by pair.

Knows names and types; the core packs the values as it packs matrices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import EMBEDDING, Float32, LoraWeights
from kvarn.backends.native import _native
from kvarn.formats.weights import TensorType

MAX_F16 = 65504.0


def pack_adapter(core: _native.Model, weights: LoraWeights, *, is_half: bool) -> _native.Adapter:
    """Pack an adapter; values that f16 cannot hold keep all of it as f32."""
    largest = max(float(np.abs(half).max()) for pair in weights.pairs.values() for half in (pair.a, pair.b))
    held = TensorType.F16 if is_half and largest <= MAX_F16 else TensorType.F32
    pairs = []
    for name, pair in weights.pairs.items():
        a = pair.a.T if name == EMBEDDING else pair.a  # a row for every token
        columns, values = pair.a.shape[1], (_raw(a, held), _raw(pair.b, held))
        pairs.append((name, len(pair.b), columns, pair.rank, pair.scale, *values))
    return core.make_adapter(held.id, pairs)


def _raw(values: Float32, held: TensorType) -> npt.NDArray[np.uint8]:
    stored = values.astype(np.float16 if held is TensorType.F16 else np.float32)
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
