"""DRY against its definition, spelled out token by token, and what a step of it costs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.sampling.dry import MAX_PENALTY, Breakers, Dry, RepeatedRuns

texts = st.lists(st.integers(0, 3), max_size=40)
breaker_sets = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
parameters = st.builds(Dry, st.just(0.5), st.just(1.5), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 30)))


def defined(x: list[int], dry: Dry, breakers: Breakers) -> dict[int, float]:
    """The module's formulas, read aloud."""
    n = len(x)
    ends = [e for e in range(n + 1) for b in breakers if e >= len(b) and tuple(x[e - len(b) : e]) == b]
    behind_breaker = max(ends, default=0)
    first = 0 if dry.window is None else max(0, n - dry.window)
    matches: dict[int, int] = {}
    for i in range(first, n - 1):
        longest = min(n - behind_breaker, i + 1 - first)
        run = max((k for k in range(longest + 1) if x[i + 1 - k : i + 1] == x[n - k : n]), default=0)
        matches[x[i + 1]] = max(matches.get(x[i + 1], 0), run)
    return {
        token: -dry.multiplier * dry.base ** (match - dry.allowed_length)
        for token, match in matches.items()
        if match >= dry.allowed_length and (token,) not in breakers
    }


def found(x: list[int], dry: Dry, breakers: Breakers = ()) -> dict[int, float]:
    ids, values = RepeatedRuns(x, breakers).penalties(dry)
    assert ids.tolist() == sorted(set(ids.tolist()))
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@given(texts, parameters, breaker_sets)
def test_penalties_are_those_of_the_definition(x: list[int], dry: Dry, breakers: Breakers) -> None:
    assert found(x, dry, breakers) == pytest.approx(defined(x, dry, breakers))


@given(texts, texts, parameters, breaker_sets)
def test_a_text_that_grew_has_the_penalties_of_one_read_at_once(
    x: list[int], more: list[int], dry: Dry, breakers: Breakers
) -> None:
    runs = RepeatedRuns(x, breakers)
    for token in more:
        runs.append(token)
    for grown, whole in zip(runs.penalties(dry), RepeatedRuns(x + more, breakers).penalties(dry), strict=True):
        np.testing.assert_array_equal(grown, whole)


def test_the_token_that_would_repeat_a_run_is_penalised_by_its_length() -> None:
    the, cat, sat, dot = 1, 2, 3, 4
    text = [the, cat, sat, dot, the, cat]
    assert found(text, Dry(0.8, 1.75, 2)) == pytest.approx({sat: -0.8})
    assert found(text, Dry(0.8, 1.75, 1)) == pytest.approx({sat: -0.8 * 1.75})
    assert found(text, Dry(0.8, 1.75, 3)) == {}


def test_a_breaker_ends_every_run_and_is_never_penalised_itself() -> None:
    text = [1, 2, 3, 9, 1, 2, 3]
    dry = Dry(1.0, 2.0, 2)
    assert found(text, dry) == pytest.approx({9: -2.0})
    assert found(text, dry, ((9,),)) == {}
    assert found([*text, 9], dry, ((9,),)) == {}
    assert found([1, 2, 3, 9, 8, 1, 2, 3], dry, ((9, 8),)) == pytest.approx({9: -2.0})
    assert found([5, 9, 8, 1, 4, 5, 9, 8, 1], dry, ((9, 8),)) == {}


def test_a_long_repetition_stays_finite() -> None:
    assert found([7] * 5000, Dry(100.0, 100.0, 1)) == {7: -MAX_PENALTY}


@pytest.mark.parametrize("vocabulary", [1, 2, 30000])
def test_a_step_at_8k_tokens_takes_less_than_a_millisecond(vocabulary: int) -> None:
    text = np.random.default_rng(0).integers(0, vocabulary, 8192).tolist()
    runs, dry, times = RepeatedRuns(text, ((5,), (6, 7))), Dry(0.8), []
    for token in text[:50]:
        start = time.perf_counter()
        runs.append(token)
        runs.penalties(dry)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3  # the best: other processes can only make it slower
