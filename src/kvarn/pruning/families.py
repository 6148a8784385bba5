"""Which models may lose what, so that llama.cpp and we still read the file: by architecture, checked by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import Autoregressive, Block, FeedForward, ModelSpec
from kvarn.pruning.cut import Cut, PrunedWeights, cut_blocks, whole

# general.architecture -> what may be removed. llama.cpp gives the heads of qwen2 the width of the model.
PRUNABLE: Final[Mapping[str, frozenset[str]]] = {
    "llama": frozenset({"layers", "ffn", "heads"}),
    "qwen2": frozenset({"layers", "ffn"}),
    "qwen3": frozenset({"layers", "ffn", "heads"}),
    "gemma3": frozenset({"layers", "ffn", "heads"}),
}


def prunable_parts(weights: WeightSource, spec: ModelSpec) -> frozenset[str]:
    """What this model may lose; models that may lose nothing are refused."""
    name = str(weights.metadata.get("general.architecture"))
    reason = _refusal(name, spec)
    if reason is not None:
        raise UnsupportedModel(f"{weights.path}: {reason}", fields=("general.architecture",))
    return PRUNABLE[name]


def require_prunable(weights: WeightSource, spec: ModelSpec, part: str) -> None:
    """Refuse to remove a part that this architecture has to keep."""
    if part not in prunable_parts(weights, spec):
        name = weights.metadata["general.architecture"]
        able = ", ".join(key for key, parts in PRUNABLE.items() if part in parts)
        raise UnsupportedModel(
            f"{weights.path}: {name} cannot lose {part}: llama.cpp would not read the file; {able} can. Remove "
            f"{' or '.join(sorted(PRUNABLE[name]))} instead",
            fields=("general.architecture",),
        )


def _refusal(name: str, spec: ModelSpec) -> str | None:
    known = ", ".join(PRUNABLE)
    if any(not isinstance(block.feed_forward, FeedForward) for block in spec.blocks):
        return f"{name} with experts cannot be pruned here; dense models of {known} can"
    if name not in PRUNABLE or not isinstance(spec.generation, Autoregressive):
        return f"{name} models cannot be pruned here; those of {known} can"
    shapes = {(b.attention.num_heads, b.attention.num_kv_heads, b.feed_forward.hidden) for b in spec.blocks}
    if len(shapes) > 1:
        return f"its layers have {len(shapes)} different shapes, of which none can go; give the model it was made from"
    return None


def require_same_function(weights: PrunedWeights, spec: ModelSpec, cut: Cut) -> None:
    """Describe the new model as a loader will: its layers have to be those that were meant to stay."""
    found = describe(weights).spec.blocks
    if found != cut_blocks(spec, cut):
        raise UnsupportedModel(
            f"{weights.path}: a file of the {len(cut.layers)} layers left would run some of them as another kind "
            "(window, rope); remove another number of layers"
        )


def layer_kinds(weights: WeightSource, spec: ModelSpec, num_layers: int) -> tuple[Block, ...]:
    """What a file of so many layers makes of each of them: architectures with windows repeat a pattern."""
    first = Cut(whole(spec).layers[:num_layers])
    return describe(PrunedWeights(weights, spec, first)).spec.blocks


def kept_layers(spec: ModelSpec, kinds: Sequence[Block], scores: npt.NDArray[np.float64]) -> tuple[int, ...] | None:
    """The layers of largest summed score that make the wanted kinds, in order; None where no choice does.

    best[j] is the sum of the best choice for the first j kinds among the layers seen so far, and what was chosen.
    """
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *([None] * len(kinds))]
    for layer, block in enumerate(spec.blocks):
        for j in range(min(layer + 1, len(kinds)), 0, -1):
            before = best[j - 1]
            if before is None or block != kinds[j - 1]:
                continue
            total, now = before[0] + float(scores[layer]), best[j]
            if now is None or total > now[0]:
                best[j] = total, (*before[1], layer)
    found = best[len(kinds)]
    return None if found is None else found[1]


def possible_depths(weights: WeightSource, spec: ModelSpec) -> tuple[int, ...]:
    """How many layers a file may have, largest first."""
    scores = np.zeros(len(spec.blocks))
    return tuple(n for n in range(len(spec.blocks), 0, -1) if _is_possible(weights, spec, n, scores))


def _is_possible(weights: WeightSource, spec: ModelSpec, num_layers: int, scores: npt.NDArray[np.float64]) -> bool:
    try:
        return kept_layers(spec, layer_kinds(weights, spec, num_layers), scores) is not None
    except (FormatError, UnsupportedModel):
        return False
