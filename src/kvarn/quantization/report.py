"""What quantising did: every tensor with the type it had, the one the recipe wanted and the one it got."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.quantization.blocks import FLOATS
from kvarn.quantization.fp8.scheme import FP8Scheme
from kvarn.quantization.storage_only.types import WrittenType


@dataclass(frozen=True, slots=True)
class TensorChange:
    """wanted is the recipe's choice; type differs from it where its blocks do not fit the rows."""

    source: TensorInfo
    wanted: WrittenType
    type: WrittenType
    is_weighted: bool = False  # errors were weighed by an importance matrix

    @property
    def is_copy(self) -> bool:
        return self.source.type is self.type

    @property
    def is_fallback(self) -> bool:
        return self.type is not self.wanted

    @property
    def could_be_weighted(self) -> bool:
        """Whether importance would change its blocks: those of 8 bits and floats are plain rounding."""
        return not self.is_copy and self.type not in (*FLOATS, TensorType.Q8_0)

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(self.source.num_values)


@dataclass(frozen=True, slots=True)
class FP8Change:
    """The same of a tensor in a folder: FP8, or as it was."""

    source: TensorInfo
    wanted: TensorType | FP8Scheme
    type: TensorType | FP8Scheme
    is_weighted: bool = False

    @property
    def is_fallback(self) -> bool:
        return self.type is not self.wanted

    @property
    def num_bytes(self) -> int:
        if isinstance(self.type, TensorType):
            return self.source.num_bytes
        return self.source.num_values + 4 * math.prod(self.type.scales_shape(*self.source.shape))


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """A file that was written. mix: or the size asked for. num_bytes: of the file; bits_per_weight: of its tensors."""

    source: str
    output: str
    mix: str
    num_bytes: int
    source_bytes: int
    seconds: float
    changes: tuple[TensorChange, ...] | tuple[FP8Change, ...]
    imatrix: str | None = None
    kl: float | None = None  # mean divergence on the text of a size, with all tensors in their types

    @property
    def bits_per_weight(self) -> float:
        num_values = sum(change.source.num_values for change in self.changes)
        return 8 * sum(change.num_bytes for change in self.changes) / num_values

    @property
    def fallbacks(self) -> tuple[TensorChange | FP8Change, ...]:
        """Tensors that got another type than the recipe's, because its blocks do not fit their rows."""
        return tuple(change for change in self.changes if change.is_fallback)

    @property
    def requantized(self) -> tuple[TensorChange, ...]:
        """Tensors that were quantised already, and were rounded a second time."""
        changes = (change for change in self.changes if isinstance(change, TensorChange))
        return tuple(change for change in changes if change.source.type not in FLOATS and not change.is_copy)

    @property
    def unweighted(self) -> tuple[TensorChange, ...]:
        """Tensors whose errors weigh evenly, as the importance matrix says nothing of them."""
        if self.imatrix is None:
            return ()
        changes = (change for change in self.changes if isinstance(change, TensorChange))
        return tuple(change for change in changes if change.could_be_weighted and not change.is_weighted)

    def types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        return dict(Counter(change.type.name for change in self.changes).most_common())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = {key: value for key, value in asdict(self).items() if key != "changes"}
        changes = [
            {
                "name": change.source.name,
                "shape": list(change.source.shape),
                "source_type": change.source.type.name,
                "wanted": change.wanted.name,
                "type": change.type.name,
                "weighted": change.is_weighted,
            }
            for change in self.changes
        ]
        return {**found, "bits_per_weight": self.bits_per_weight, "types": self.types(), "tensors": changes} | {
            "requantized": len(self.requantized),
            "unweighted": len(self.unweighted),
        }
