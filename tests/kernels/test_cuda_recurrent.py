"""The kernels of recurrent layers in Triton's interpreter beside the plain operations; skipped without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvarn.backends.batch import Batch, StateSlots
from kvarn.models.recurrent import conv_channels, state_floats
from kvarn.models.spec import Block, FeedForward, Norm
from kvarn.models.state_layers import GatedDeltaNet, ShortConv
from tests.kernels.interpreted import interpreted

torch = pytest.importorskip("torch")
cuda = interpreted("recurrent")

WIDTH = 24
NORM = Norm("rms", 1e-6)
LAYERS = {
    "delta net": GatedDeltaNet(2, 4, 12, 10, 4, NORM),
    "delta net, tiled": GatedDeltaNet(3, 6, 8, 16, 2, NORM, tiled=True),
    "short conv": ShortConv(WIDTH, 3),
}


@dataclass
class Layer:
    """A layer of random weights, its slots, and both ways to compute it."""

    mixer: Any
    block: Any
    slots: Any

    def plain(self, x: Any, batch: Batch) -> Any:
        from kvarn.backends.torch.mixers.recurrent import RowOps, recur
        from kvarn.backends.torch.plain import PlainOps

        ops = PlainOps()
        return recur(x, self.block, RowOps(ops.linear, ops.normalise), batch, self.slots)

    def kernels(self, x: Any, batch: Batch, num_padding: int = 0) -> Any:
        from kvarn.backends.torch.mixers.recurrent import make_state_rows
        from kvarn.backends.torch.plain import PlainOps

        linear, weights = PlainOps().linear, self.block.recurrent
        x = torch.cat([x, torch.full((num_padding, WIDTH), 3.0)])
        rows = make_state_rows(batch, len(x), x.device)
        if isinstance(self.mixer, ShortConv):
            found = cuda.short_conv(linear(x, self.block.qkv), weights.conv, self.mixer, rows, self.slots)
        else:
            parts = (self.block.qkv, weights.gate, weights.alpha, weights.beta)
            given = cuda.Projections(*(linear(x, part) for part in parts))
            found = cuda.delta_net(given, weights, self.mixer, rows, self.slots)
        return found[: len(x) - num_padding]


def _layer(kind: str) -> Layer:
    from kvarn.backends.torch.weights import BlockWeights, DeltaNetWeights, Linear, NormWeights, ShortConvWeights

    mixer, rng = LAYERS[kind], torch.Generator().manual_seed(0)

    def new(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng) * 0.4

    if isinstance(mixer, ShortConv):
        qkv, weights = new(3 * WIDTH, WIDTH), ShortConvWeights(new(WIDTH, mixer.kernel))
    else:
        heads, values = mixer.num_value_heads, mixer.num_value_heads * mixer.value_dim
        qkv = new(conv_channels(mixer), WIDTH)
        gate, beta, alpha = (Linear(new(count, WIDTH)) for count in (values, heads, heads))
        norm = NormWeights(NORM, 1 + new(mixer.value_dim), None)
        conv, dt, a = new(conv_channels(mixer), mixer.kernel), new(heads), -torch.abs(new(heads))
        weights = DeltaNetWeights(gate, beta, alpha, conv, dt, a, norm)
    block = Block(mixer, FeedForward(1, "silu"), NORM)
    nothing = Linear(new(1, 1))
    made = BlockWeights(0, block, Linear(qkv), nothing, None, None, None, {}, recurrent=weights)  # type: ignore[arg-type]
    return Layer(mixer, made, torch.full((8, state_floats(mixer)), 9.0))  # what a slot held before must not matter


def _batch(
    lengths: list[int], starts: list[int], read: list[int], written: list[int], saved: dict[int, int] | None = None
) -> Batch:
    row_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    ends, rows = np.add(starts, lengths).astype(np.int32), np.arange(sum(lengths), dtype=np.int32)
    slots = [np.array(one, np.int32) for one in (read, written, list(saved or {}), list((saved or {}).values()))]
    return Batch(
        rows, positions, row_starts, ends, np.zeros((len(lengths), 1), np.int32), rows, states=StateSlots(*slots)
    )


def _rows(count: int) -> Any:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", LAYERS)
def test_the_kernels_give_what_the_plain_operations_give(kind: str) -> None:
    """Two sequences, one of them from a state, the other with a copy on its way; outputs and all slots."""
    first, x = _batch([2], [0], [-1], [0]), _rows(9)
    both = _batch([2, 5], [2, 0], [0, -1], [1, 2], {4: 3})
    found = []
    for way in ("plain", "kernels"):
        layer = _layer(kind)
        parts = [getattr(layer, way)(x[:2], first), getattr(layer, way)(x[2:], both)]
        found.append((torch.cat(parts), layer.slots))
    (wanted, slots), (out, own_slots) = found
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(own_slots, slots, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_chunks_neighbours_and_padding_change_no_bit(kind: str) -> None:
    x, layer = _rows(8), _layer(kind)
    whole = layer.kernels(x[:6], _batch([6], [0], [-1], [0], {1: 3}), num_padding=3)
    chunks = _layer(kind)
    parts = [chunks.kernels(x[:1], _batch([1], [0], [-1], [4])), chunks.kernels(x[1:2], _batch([1], [1], [4], [3]))]
    beside = chunks.kernels(torch.cat([x[6:], x[2:6]]), _batch([2, 4], [0, 2], [-1, 3], [5, 0]))
    assert torch.equal(torch.cat([*parts, beside[2:]]), whole)
    assert torch.equal(chunks.slots[[0, 3]], layer.slots[[0, 3]])
