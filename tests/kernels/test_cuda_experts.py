"""The kernels of experts in Triton's interpreter, on the CPU, beside the plain operations; skipped without Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvarn.models.spec import ExpertGroups, MixtureOfExperts, SharedExpert
from tests.kernels.interpreted import interpreted

torch = pytest.importorskip("torch")
cuda = interpreted("experts")

WIDTH = 40  # no multiple of a tile
BASE = MixtureOfExperts(num_experts=6, num_active=2, hidden=24, activation="silu", renormalise=True)
KINDS = {
    "softmax": BASE,
    "sigmoid, groups, selection bias": replace(
        BASE, num_experts=9, num_active=4, scoring="sigmoid", groups=ExpertGroups(3, 2), selection_bias=True, scale=2.5
    ),
    "biases, oai": replace(BASE, activation="swiglu_oai", router_bias=True, expert_bias=True, renormalise=False),
    "shared, gelu": replace(BASE, activation="gelu", shared=SharedExpert(16, gate=True)),
    "groups judged by one, factors of experts": replace(
        BASE, num_experts=8, num_active=3, groups=ExpertGroups(4, 2, 1), expert_scale=True, scale=1.5
    ),
    "groups of one": replace(BASE, activation="relu2", groups=ExpertGroups(6, 3), num_active=3),
    "all of them, tanh": replace(BASE, num_active=6, activation="gelu_tanh", scale=0.5, shared=SharedExpert(16)),
}


def _weights(moe: MixtureOfExperts, seed: int = 0) -> Any:
    from kvarn.backends.torch.weights import ExpertWeights, FeedForwardWeights, Linear

    rng = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng) * 0.3

    e, bias = moe.num_experts, moe.expert_bias
    shared = moe.shared
    return ExpertWeights(
        Linear(new(e, WIDTH), new(e) if moe.router_bias else None),
        Linear(new(e, 2 * moe.hidden, WIDTH), 9 * new(e, 2 * moe.hidden) if bias else None),
        Linear(new(e, WIDTH, moe.hidden), new(e, WIDTH) if bias else None),
        new(e) if moe.selection_bias else None,
        shared and FeedForwardWeights(Linear(new(2 * shared.hidden, WIDTH)), Linear(new(WIDTH, shared.hidden))),
        new(WIDTH) if shared is not None and shared.gate else None,
        new(e) if moe.expert_scale else None,
    )


def _run(x: Any, weights: Any, moe: MixtureOfExperts, tile: int = 16, num_padding: int = 0) -> Any:
    """The kernels over x and rows of padding, which they must not look at."""
    from kvarn.backends.torch.plain import PlainOps

    ops, count = PlainOps(), len(x)
    x = torch.cat([x, torch.full((num_padding, WIDTH), 5.0)])
    shared = None
    if weights.shared is not None:
        hidden = ops.activate(ops.linear(x, weights.shared.gate_up), moe.activation, gated=True)
        shared = ops.linear(hidden, weights.shared.down)
    logits = torch.stack([weights.router.weight @ row for row in x])
    slots = None if num_padding == 3 else torch.tensor([7] * count + [-1] * num_padding)
    return cuda.run_experts(cuda.ExpertRows(x, logits, shared, slots, count), weights, moe, tile)[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_give_what_the_plain_operations_give(kind: str) -> None:
    from kvarn.backends.torch.plain import PlainOps

    moe = KINDS[kind]
    weights, x = _weights(moe), torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    found, wanted = _run(x, weights, moe, num_padding=5), PlainOps().experts(x, weights, moe, None)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_neighbours_and_padding_change_no_bit() -> None:
    """26 rows, more than a tile for some expert; the first and the last ones alone.

    Another tile changes the interpreter's own products, but no more than that.
    """
    moe = KINDS["sigmoid, groups, selection bias"]
    weights, x = _weights(moe), torch.randn(26, WIDTH, generator=torch.Generator().manual_seed(2))
    whole = _run(x, weights, moe)
    assert torch.allclose(_run(x, weights, moe, tile=32, num_padding=3), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(_run(x[:5], weights, moe, num_padding=11), whole[:5])
    assert torch.equal(_run(x[19:], weights, moe), whole[19:])


def test_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = KINDS["biases, oai"]
    weights, x = _weights(moe), torch.randn(13, WIDTH, generator=torch.Generator().manual_seed(3))
    whole = _run(x, weights, moe)
    monkeypatch.setattr(cuda, "MAX_ROWS", 8)
    assert torch.equal(_run(x, weights, moe, num_padding=3), whole)


def test_equal_experts_go_to_the_lower_index_and_nan_chooses_as_many() -> None:
    moe = replace(BASE, num_active=3)
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0], [float("nan")] * 6])  # a row of a broken model
    rows = cuda.ExpertRows(torch.zeros(2, WIDTH), logits, None, None, 2)
    found = cuda.route(rows, _weights(moe), moe)
    assert found.experts[0].tolist() == [1, 2, 3]
    assert sorted(set(found.experts[1].tolist())) == found.experts[1].tolist()
