"""Checks of single values that a caller gave, with the message every refusal has: name, value, what to give."""

from __future__ import annotations

import math

from kvarn.errors import InvalidParameter


def check_number(name: str, value: object, low: float, high: float, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        raise InvalidParameter(f"{name} is {short(value)}; give a number from {low:g} to {high:g}")


def check_integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParameter(f"{name} is {short(value)}; give a whole number from {low} to {high}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {short(value)}; give True or False")


def check_one_of(name: str, value: object, accepted: tuple[str, ...], *, optional: bool = False) -> None:
    if not (value is None and optional) and value not in accepted:
        raise InvalidParameter(f"{name} is {short(value)}; choose one of {', '.join(accepted)}")


def short(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
