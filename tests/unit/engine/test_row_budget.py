"""Rows for spans that cannot be cut: shared, saved up for, never withheld for ever."""

from __future__ import annotations

from kvarn import SamplingParams
from kvarn.engine.scheduling.row_budget import RowBudget
from kvarn.request import Request
from tests.submitting import new_request


def request(name: str) -> Request:
    return new_request(name, (1,), SamplingParams(), 8, seed=0)


def served(budget: RowBudget, wanted: dict[str, int]) -> list[str]:
    """Who of these, in order, gets rows in the next step."""
    budget.open()
    found = []
    for name, rows in wanted.items():
        if budget.offer(request(name), rows):
            budget.spend(rows)
            found.append(name)
    if not found and budget.first_refused is not None:
        found.append(budget.first_refused.id)
    budget.close()
    return found


def test_spans_share_a_step_as_far_as_they_fit() -> None:
    assert served(RowBudget(100), {"a": 60, "b": 50, "c": 40}) == ["a", "c"]


def test_a_span_larger_than_a_step_does_not_wait_when_it_is_alone() -> None:
    assert served(RowBudget(100), {"a": 350}) == ["a"]


def test_a_span_larger_than_a_step_saves_up_beside_others() -> None:
    budget = RowBudget(100)
    steps = [served(budget, {"large": 350, "b": 32, "c": 32, "d": 32}) for _ in range(8)]
    first = next(index for index, names in enumerate(steps) if "large" in names)
    assert 2 <= first <= 6
    assert all(names for names in steps)
    assert all("b" in names for names in steps[:first])


def test_nothing_is_saved_when_nobody_needs_it() -> None:
    budget = RowBudget(100)
    for _ in range(5):
        served(budget, {"a": 10})
    assert served(budget, {"b": 32, "large": 350}) == ["b"]
