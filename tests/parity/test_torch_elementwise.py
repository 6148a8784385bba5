"""Functions of single values on the CPU: the same bits for few values and for many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvarn.backends.torch.elementwise import by_value  # noqa: E402


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "log1p"])
def test_a_value_has_the_same_bits_alone_and_among_any_number_of_others(name: str) -> None:
    function = getattr(torch, name)
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).abs()
    whole = by_value(function, x)
    for first, count in [(0, 1), (7, 5), (100, 31), (33, 33), (1, 16_385), (5, 39_995)]:
        assert torch.equal(by_value(function, x[first : first + count]), whole[first : first + count])


def test_torch_itself_rounds_what_is_left_over_of_a_vector_differently() -> None:
    """The reason for by_value; where this fails, torch has changed and it is no longer needed."""
    x = torch.randn(64 * 500, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([torch.exp(one) for one in x.split(1)])
    if torch.equal(alone, torch.exp(x)):
        pytest.skip("not on this processor")
    assert torch.allclose(alone, torch.exp(x), rtol=1e-6)
