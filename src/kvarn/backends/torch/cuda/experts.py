"""A layer of experts in six launches, without a word to the host: routes, places, two products, the weighted sum.

Only the experts that some row meets are read. A row's bits do not depend on the rows beside it: each product is one
chain over the inner dimension (matmul.py), and a row's experts are added in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from kvarn.backends.torch.cuda import expert_kernels as kernels
from kvarn.backends.torch.cuda.matmul import MAX_SHARED, Tiling, fitting
from kvarn.backends.torch.weights import ExpertStack, ExpertWeights
from kvarn.models.spec import MixtureOfExperts

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "swiglu_oai": 4}
MAX_ROWS = 4096  # at once: memory for their products is taken
PAIRS_PER_BLOCK = 1024
COLUMNS_PER_PROGRAM = 1024
MAX_PROGRAMS = 4  # of one multiprocessor
# By rows of a tile: the tiling of gate and up together, and of down.
TILINGS = {
    16: (Tiling(16, 64, 128, 3, 4, is_tall=True), Tiling(16, 64, 128, 4, 4, is_tall=True)),
    32: (Tiling(32, 64, 64, 5, 4, is_tall=True), Tiling(32, 64, 128, 4, 4, is_tall=True)),
    64: (Tiling(64, 64, 64, 4, 4, is_tall=True), Tiling(64, 64, 128, 3, 4, is_tall=True)),
    128: (Tiling(128, 128, 64, 4, 8, is_tall=False), Tiling(128, 128, 64, 4, 8, is_tall=False)),
}


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of a layer: those of padding have a slot below 0, or lie behind num_rows where there are no slots."""

    x: Tensor  # (rows, width)
    logits: Tensor  # (rows, experts) float32, of the router without its bias
    shared: Tensor | None  # (rows, width) what the shared expert gave, before its gate
    slots: Tensor | None
    num_rows: int

    def part(self, first: int, end: int) -> ExpertRows:
        shared, slots = (None if one is None else one[first:end] for one in (self.shared, self.slots))
        return ExpertRows(self.x[first:end], self.logits[first:end], shared, slots, self.num_rows - first)


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of every row in ascending order."""

    experts: Tensor  # (rows, active) int32; -1 for padding
    shares: Tensor  # (rows, active)
    gates: Tensor  # (rows) of the shared expert
    counts: Tensor  # (experts) pairs of each


@dataclass(frozen=True, slots=True)
class Places:
    """Pairs by their experts, in tiles."""

    order: Tensor  # (pairs) int32
    tiles: Tensor  # (most tiles, 3): expert, first and end of the order
    num_tiles: Tensor  # (1)


def run_experts(rows: ExpertRows, weights: ExpertWeights, moe: MixtureOfExperts, tile: int | None = None) -> Tensor:
    """Everything behind the router, (rows, width); any tile gives the same bits."""
    out = torch.empty_like(rows.x)
    for first in range(0, len(rows.x), MAX_ROWS):
        part = rows.part(first, first + MAX_ROWS)
        _run_part(part, weights, moe, tile or tile_rows(len(part.x), moe), out[first : first + MAX_ROWS])
    return out


def tile_rows(num_rows: int, moe: MixtureOfExperts) -> int:
    """Rows of a tile for so many rows in all, by how many an expert meets."""
    mean = num_rows * moe.num_active / moe.num_experts
    return 16 if num_rows <= 16 or mean <= 8 else 32 if mean <= 24 else 64 if mean <= 96 else 128


def _run_part(rows: ExpertRows, weights: ExpertWeights, moe: MixtureOfExperts, tile: int, out: Tensor) -> None:
    routes = route(rows, weights, moe)
    places = _place(routes, moe, tile)
    gate, down = TILINGS[tile]
    num_pairs, width = routes.experts.numel(), rows.x.shape[1]
    hidden, products = (
        torch.empty(num_pairs, size, device=out.device, dtype=out.dtype) for size in (moe.hidden, width)
    )
    _multiply(rows.x, weights.gate_up, hidden, places, moe, gate, is_gated=True)
    _multiply(hidden, weights.down, products, places, moe, down, is_gated=False)
    kernels.combine_kernel[(len(out), triton.cdiv(width, COLUMNS_PER_PROGRAM))](
        products, routes.experts, routes.shares, rows.shared, routes.gates, out,
        WIDTH=width, ACTIVE=moe.num_active, COLUMNS=COLUMNS_PER_PROGRAM, HAS_SHARED=rows.shared is not None,
        HAS_GATE=weights.shared_gate is not None,
    )  # fmt: skip


def route(rows: ExpertRows, weights: ExpertWeights, moe: MixtureOfExperts) -> Routes:
    """Choose every row's experts, as plain.route defines it."""
    count, device = len(rows.x), rows.x.device
    experts = torch.empty(count, moe.num_active, device=device, dtype=torch.int32)
    shares, gates = torch.empty(count, moe.num_active, device=device), torch.empty(count, device=device)
    counts = torch.zeros(moe.num_experts, device=device, dtype=torch.int32)
    groups = 1 if moe.groups is None else moe.groups.count
    kernels.route_kernel[(count,)](
        rows.logits, weights.router.bias, weights.selection_bias, rows.slots, rows.num_rows, rows.x, rows.x.stride(0),
        weights.shared_gate, experts, shares, gates, counts, weights.scale, moe.scale,
        EXPERTS=moe.num_experts, ACTIVE=moe.num_active, GROUPS=groups,
        ACTIVE_GROUPS=0 if moe.groups is None else moe.groups.num_active,
        JUDGED=0 if moe.groups is None else moe.groups.num_judged,
        PADDED_GROUPS=triton.next_power_of_2(groups), PADDED_MEMBERS=triton.next_power_of_2(moe.num_experts // groups),
        WIDTH=rows.x.shape[1], COLUMNS=COLUMNS_PER_PROGRAM, IS_SOFTMAX=moe.scoring == "softmax",
        RENORMALISE=moe.renormalise, HAS_ROUTER_BIAS=weights.router.bias is not None,
        HAS_SELECTION_BIAS=weights.selection_bias is not None, HAS_SLOTS=rows.slots is not None,
        HAS_SHARED_GATE=weights.shared_gate is not None, HAS_EXPERT_SCALE=weights.scale is not None,
    )  # fmt: skip
    return Routes(experts, shares, gates, counts)


def most_tiles(num_rows: int, moe: MixtureOfExperts, tile: int) -> int:
    """Tiles of the worst routing: a row meets an expert once, so an expert has at most num_rows pairs."""
    num_pairs = num_rows * moe.num_active
    used = min(num_pairs, moe.num_experts)
    return used if num_rows <= tile else used + num_pairs // tile


def _place(routes: Routes, moe: MixtureOfExperts, tile: int) -> Places:
    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, device=routes.experts.device, dtype=torch.int32)

    num_pairs, most = routes.experts.numel(), most_tiles(len(routes.experts), moe, tile)
    places = Places(new(num_pairs), new(most, 3), new(1))
    kernels.place_kernel[(moe.num_experts + 1,)](
        routes.experts, routes.counts, num_pairs, places.order, places.tiles, places.num_tiles,
        EXPERTS=moe.num_experts, PADDED=triton.next_power_of_2(moe.num_experts), TILE=tile, BLOCK=PAIRS_PER_BLOCK,
    )  # fmt: skip
    return places


def _multiply(
    x: Tensor, stack: ExpertStack, out: Tensor, places: Places, moe: MixtureOfExperts, tiling: Tiling, *, is_gated: bool
) -> None:
    matrices = 2 if is_gated else 1
    columns, depth = stack.weight.shape[1] // matrices, stack.weight.shape[2]
    tile = fitting(tiling, x.element_size(), matrices)
    per_device = _num_multiprocessors(x.device) * min(
        MAX_PROGRAMS, max(1, MAX_SHARED // tile.buffers(x.element_size(), matrices))
    )
    kernels.product_kernel[(min(per_device, len(places.tiles) * triton.cdiv(columns, tile.columns)),)](
        x, stack.weight, stack.bias, out, places.order, places.tiles, places.num_tiles, columns, x.stride(0),
        out.stride(0), DEPTH=depth, ACTIVE=moe.num_active, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.depth,
        STAGES=tile.stages, IS_TALL=tile.is_tall, IS_EVEN=depth % tile.depth == 0 and columns % tile.columns == 0,
        IS_GATED=is_gated, KIND=ACTIVATIONS[moe.activation], HAS_BIAS=stack.bias is not None, num_warps=tile.warps,
    )  # fmt: skip


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
