"""Tiers: defaults, what a configuration makes of them, and what it may not."""

from __future__ import annotations

import pytest

from kvarn.errors import ConfigError
from kvarn.server.access.tiers import DEFAULT_TIERS, read_tiers


def test_a_tier_is_configured_over_its_default() -> None:
    tiers = read_tiers({"free": {"concurrency": 16}, "gold": {"max_priority": 50, "requests_per_min": 7}})
    assert tiers["free"].concurrency == 16
    assert tiers["free"].requests_per_min == DEFAULT_TIERS["free"].requests_per_min
    assert (tiers["gold"].priority, tiers["gold"].tokens_per_min) == (50, None)
    assert tiers["pro"] == DEFAULT_TIERS["pro"]


def test_a_limit_can_be_lifted_by_name() -> None:
    assert read_tiers({"free": {"tokens_per_min": "unlimited"}})["free"].tokens_per_min is None


@pytest.mark.parametrize(
    "table",
    [
        {"free": {"concurrency": 0}},
        {"free": {"concurrency": True}},
        {"free": {"concurrency": 1.5}},
        {"free": {"requests_per_min": -1}},
        {"free": {"priority": 101}},
        {"free": {"priority": 5, "max_priority": 4}},
        {"free": {"colour": "red"}},
        {"free": {"sees_metrics": 1}},
        {"free": 3},
        {"": {}},
        [],
    ],
)
def test_a_wrong_tier_is_refused(table: object) -> None:
    with pytest.raises(ConfigError):
        read_tiers(table)


@pytest.mark.parametrize(("asked", "given"), [(None, 20), (5, 5), (20, 20), (100, 20), (-100, -100)])
def test_a_priority_is_clamped_to_the_tier(asked: int | None, given: int) -> None:
    assert DEFAULT_TIERS["pro"].clamp(asked) == given
