"""The shapes a model may be cut to: which numbers of layers, heads and channels there are, and what each one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvarn.errors import ConfigError
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec

HIDDEN_STEP = 32  # channels: rows of every block type of 32 stay whole
MAX_HEAD_MISMATCH = 0.1  # of a head, for ratios such as 0.33


@dataclass(frozen=True, slots=True)
class CutShape:
    """Uniform over all layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads}/{self.kv_heads} heads, {self.hidden:,} channels"


@dataclass(frozen=True, slots=True)
class CutBudget:
    """What a shape takes, of `what`, and the most it may; told: what to ask for, to be allowed so much."""

    limit: int
    what: str
    size: Callable[[CutShape], int]
    told: Callable[[int], str]

    def fits(self, shape: CutShape) -> bool:
        return self.size(shape) <= self.limit


def shape_of(spec: ModelSpec) -> CutShape:
    block = spec.blocks[0]
    attention = block.attention
    return CutShape(len(spec.blocks), block.feed_forward.hidden, attention.num_heads, attention.num_kv_heads)


def hidden_step(weights: WeightSource, spec: ModelSpec) -> int:
    """What the number of channels has to be a multiple of, so that ffn_down keeps its type."""
    types = [weights.tensors[f"blk.{layer}.ffn_down.weight"].type for layer in range(len(spec.blocks))]
    return max(HIDDEN_STEP, *(type.block_values for type in types))


def cut_hidden(hidden: int, ratio: float, step: int) -> int:
    """The multiple of step nearest to what a ratio leaves; all of it for 0. One that leaves all or none is refused."""
    if ratio == 0:
        return hidden
    left = round(hidden * (1 - ratio) / step) * step
    if 0 < left < hidden:
        return left
    possible = [f"{1 - channels / hidden:.3g}" for channels in range(hidden - step, 0, -step)]
    ends = " to ".join(dict.fromkeys([possible[0], possible[-1]])) if possible else ""
    listed = f"give {ends}" if ends else f"there are only {hidden:,}; leave it out"
    what = "none would stay" if left <= 0 else "nothing would go"
    raise ConfigError(f"ffn is {ratio:g}: channels go by {step}, of {hidden:,} {what}; {listed}")


def head_shapes(shape: CutShape) -> Iterator[tuple[int, int]]:
    """(heads, KV heads) after whole KV groups go, or equally many query heads of each group; largest first."""
    shared = shape.heads // shape.kv_heads
    groups = {(kv * shared, kv) for kv in range(1, shape.kv_heads + 1)}
    queries = {(shape.kv_heads * each, shape.kv_heads) for each in range(1, shared + 1)}
    yield from sorted(groups | queries, reverse=True)


def cut_heads(shape: CutShape, ratio: float) -> list[tuple[int, int]]:
    """The ways to remove a ratio of the heads; a ratio that has none is refused with those that have."""
    removed = round(shape.heads * ratio)
    found = [(heads, kv) for heads, kv in head_shapes(shape) if heads == shape.heads - removed]
    if not found or abs(shape.heads * ratio - removed) > MAX_HEAD_MISMATCH:
        ratios = sorted({1 - heads / shape.heads for heads, _ in head_shapes(shape)} - {0.0})
        listed = ", ".join(f"{one:.3g}" for one in ratios) or "none: it has a single head"
        raise ConfigError(
            f"heads is {ratio:g}: {shape.heads * ratio:.4g} of {shape.heads} heads in {shape.kv_heads} groups, which "
            f"does not divide; groups go whole or lose equally many query heads each: give one of {listed}"
        )
    return found


def largest_hidden(shape: CutShape, budget: CutBudget, step: int) -> int | None:
    """The most channels with which a shape fits, at most as many as it has."""
    if budget.fits(shape):
        return shape.hidden
    low, high = 0, -(-shape.hidden // step)  # low fits or is nothing, high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if budget.fits(CutShape(shape.layers, middle * step, shape.heads, shape.kv_heads)):
            low = middle
        else:
            high = middle
    return low * step if low else None


def require_possible(smallest: CutShape, budget: CutBudget) -> None:
    """Refuse a budget below the smallest shape there is."""
    least = budget.size(smallest)
    if least > budget.limit:
        raise ConfigError(
            f"the smallest this model can be has {least:,} {budget.what} ({smallest}), the budget is "
            f"{budget.limit:,}; give at least {budget.told(least)}"
        )
