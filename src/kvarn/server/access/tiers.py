"""Tiers of API keys: requests and tokens a minute, concurrency, priority, bytes stored.

Values only; limits.py enforces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvarn.checks import check_setting
from kvarn.errors import ConfigError
from kvarn.types import MAX_PRIORITY

MAX_PER_MINUTE = 2**40
MAX_NAME = 64

_check_limit = replace(check_setting, booleans="true or false", hint=", or leave it out for no limit")


@dataclass(frozen=True, slots=True)
class Tier:
    """Limits hold for each key by itself; None: no limit."""

    name: str
    requests_per_min: int | None = None
    tokens_per_min: int | None = None  # prompt and answer together
    concurrency: int | None = None  # answers, from before the body is read to the last byte
    storage_bytes: int | None = None  # of all collections of the key's group, on disk
    max_priority: int = 0  # what a request may ask for
    priority: int = 0  # of a request that asks for none
    sees_metrics: bool = False  # /metrics covers the requests of all keys

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ConfigError(f"a tier is called {self.name!r:.80}; give 1 to {MAX_NAME} printable characters")
        for name in ("requests_per_min", "tokens_per_min", "concurrency", "storage_bytes"):
            _check_limit.integer(self._label(name), getattr(self, name), 1, MAX_PER_MINUTE, optional=True)
        for name in ("max_priority", "priority"):
            check_setting.integer(self._label(name), getattr(self, name), -MAX_PRIORITY, MAX_PRIORITY)
        if self.priority > self.max_priority:
            raise ConfigError(
                f"tier {self.name!r} has priority {self.priority}, more than its max_priority {self.max_priority}"
            )
        _check_limit.flag(self._label("sees_metrics"), self.sees_metrics)

    def clamp(self, priority: int | None) -> int:
        """The priority a request gets: what it asks for, but no more than the tier allows."""
        return self.priority if priority is None else min(priority, self.max_priority)

    def _label(self, name: str) -> str:
        return f"{name} of tier {self.name!r}"


UNLIMITED = Tier("unlimited", max_priority=MAX_PRIORITY, sees_metrics=True)  # of every caller, when there are no keys

# One level of priority is worth ageing_s (10 s) of waiting: the gap of 20 keeps a waiting free request behind paid ones
# for 200 s, while it still gets its background_share of step time.
DEFAULT_TIERS: Mapping[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("free", requests_per_min=60, tokens_per_min=60_000, concurrency=4, storage_bytes=256 << 20),
        Tier(
            "pro",
            requests_per_min=600,
            tokens_per_min=1_000_000,
            concurrency=32,
            storage_bytes=16 << 30,
            max_priority=20,
            priority=20,
        ),
        Tier("enterprise", concurrency=256, max_priority=40, priority=40, sees_metrics=True),
    )
}


def read_tiers(table: object) -> dict[str, Tier]:
    """The tiers of a configuration's [tiers.NAME] tables over the default ones; what a table leaves out stays."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"tiers is {table!r:.60}; give one table [tiers.NAME] for each")
    tiers = dict(DEFAULT_TIERS)
    for name, given in table.items():
        tiers[name] = _read_tier(name, given, tiers.get(name))
    return tiers


def unknown_tier(name: str, tiers: Iterable[str]) -> str:
    """Why a key's tier is refused, and what would do."""
    return f"there is no tier {name!r:.80}; choose one of {', '.join(tiers)}"


def _read_tier(name: str, given: object, known: Tier | None) -> Tier:
    if not isinstance(given, Mapping):
        raise ConfigError(f"tiers.{name} is {given!r:.60}; give a table of limits")
    accepted = [field.name for field in fields(Tier) if field.name != "name"]
    unknown = [key for key in given if key not in accepted]
    if unknown:
        raise ConfigError(f"tiers.{name} has {unknown[0]!r:.60}; choose from {', '.join(accepted)}")
    base: dict[str, Any] = {} if known is None else {key: getattr(known, key) for key in accepted}
    values = {**base, **{key: None if value in ("none", "unlimited") else value for key, value in given.items()}}
    if "priority" not in given and "max_priority" in given:  # one word is enough to raise or lower both
        values["priority"] = values["max_priority"]
    return Tier(name, **values)
