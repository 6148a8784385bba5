"""Functions of single values on the CPU: the same bits for few values and for many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvarn.backends.torch.elementwise import by_value  # noqa: E402


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "log1p", "softplus"])
def test_a_value_has_the_same_bits_alone_and_among_any_number_of_others(name: str) -> None:
    function = getattr(torch, name, torch.nn.functional.softplus)
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).abs()
    whole = by_value(function, x)
    for first, count in [(0, 1), (7, 5), (100, 31), (33, 33), (1, 16_385), (5, 39_995)]:
        assert torch.equal(by_value(function, x[first : first + count]), whole[first : first + count])
